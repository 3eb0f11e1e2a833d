//! The same bytes from any machine, any number of threads, and any number of deaths on the way.

#[path = "../common/mod.rs"]
mod common;

mod deaths;
mod locks;
mod memory;
mod same_bytes;
