//! Damaged inputs: never a panic, never accepted where the reference reader refuses.

mod header;
