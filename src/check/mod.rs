//! Commands that read artifacts and checkpoints and judge or show them.

pub mod diff;
pub mod inspect;
pub mod verify;
