//! The instruments against other implementations, and what they refuse.

#[path = "../common/mod.rs"]
mod common;
mod tasks;
