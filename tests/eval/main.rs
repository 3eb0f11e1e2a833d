//! The instruments, through the program: dumps, KL, records.

#[path = "../common/mod.rs"]
mod common;

mod kl;
