//! Instruments: how far a candidate is from its teacher, what it can still do, and whether a difference is real.
//!
//! [`dump`] keeps what a teacher said about a text, [`kl`] holds a candidate against it, [`tasks`] asks it questions,
//! [`stop`] watches it begin and end its answers, [`compare`] says whether two results differ, and [`db`] keeps every
//! result with all that it depends on. Nothing here decides the bytes of an artifact; but the numbers are functions of
//! models, text and settings alone, whatever the threads and the instruction set.

pub mod compare;
pub mod db;
pub mod dump;
mod error;
pub mod forward;
pub mod identity;
pub mod kl;
pub mod stop;
pub mod tasks;
pub mod work;

pub use error::EvalError;

use serde_json::{Value, json};

/// Is told how far an instrument is.
pub trait Progress: Sync {
    /// What the pass will hold in memory, before it starts.
    fn need(&self, need: &forward::Need);
    /// `done` of `total` steps.
    fn at(&self, done: u64, total: u64, unit: &'static str);
}

/// Nobody is told.
impl Progress for () {
    fn need(&self, _: &forward::Need) {}
    fn at(&self, _: u64, _: u64, _: &'static str) {}
}

/// The machine, for the records: no result depends on it.
pub fn machine() -> Value {
    json!({
        "processor": crate::process::processor(),
        "cores": std::thread::available_parallelism().map_or(1, std::num::NonZero::get),
        "memory": crate::process::machine_memory().map(|(total, _)| total),
        "system": std::env::consts::OS,
        "architecture": std::env::consts::ARCH,
        "isa": crate::isa::Isa::best().to_string(),
    })
}
