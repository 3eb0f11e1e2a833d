//! Instruments: how far a candidate is from its teacher, what it can still do, and whether a difference is real.

pub mod tasks;
