//! The command line as its user meets it: exit codes, messages, and what is left on disk.

#[path = "../common/mod.rs"]
mod common;

mod bad_requests;
mod bad_sources;
mod generate;
mod hostile;
mod import;
mod repack;
mod sizes;
mod verdicts;
