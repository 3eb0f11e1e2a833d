//! What every entry of a registry, every module and every artifact must keep to, whoever adds the next one.

#[path = "../common/mod.rs"]
mod common;

mod artifacts;
mod layers;
mod mutations;
mod registries;
