//! Damaged inputs: never a panic, never accepted where the reference reader refuses.

#[path = "../common/mod.rs"]
mod common;
mod header;
mod runtime;
