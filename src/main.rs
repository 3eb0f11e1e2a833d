//! The `tqc` command.

fn main() {}
