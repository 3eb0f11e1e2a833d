//! The files of an artifact, as stock mlx-lm reads them, and the record of how they came to be.

pub mod card;
pub mod config;
pub mod layout;
pub mod open;
pub mod provenance;

/// Name of the record; its SHA-256 is the artifact's digest, because it names every other file's.
pub const PROVENANCE: &str = "provenance.json";

/// Name of the machine's facts, which no digest covers.
pub const MACHINE: &str = "machine.json";
