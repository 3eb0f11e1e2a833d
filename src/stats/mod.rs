//! What a number is worth: intervals, paired tests, equivalence, power.
//!
//! Pure functions of their arguments; random draws come from a stated seed.
