//! The instruments: against other implementations and arithmetic, and what they refuse.

#[path = "../common/mod.rs"]
mod common;

mod kl;
mod tasks;
