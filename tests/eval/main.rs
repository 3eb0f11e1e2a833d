//! The instruments: against arithmetic and other implementations, and what they refuse.

#[path = "../common/mod.rs"]
mod common;

mod compare;
mod kl;
mod llama;
mod report;
mod stop;
mod tasks;
