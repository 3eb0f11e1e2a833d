//! A toolkit and compiler for quantized language models.
//!
//! Modules are listed bottom to top: a module uses only those listed before it
//! (`tests/contracts/layers.rs` enforces this). `linalg`, `stats`, `codec`, `quant`, `transform` and `alloc` are
//! pure:
//! no files, no devices, no clock.

pub mod failure;
pub mod units;
pub mod digest;
pub mod tensor;
pub mod isa;
pub mod numeric;
pub mod linalg;
pub mod sample;
pub mod stats;
pub mod codec;
pub mod quant;
pub mod transform;
pub mod recipe;
pub mod checkpoint;
pub mod hub;
pub mod arch;
pub mod alloc;
pub mod stage;
pub mod tool;
pub mod process;
pub mod artifact;
pub mod backend;
pub mod text;
pub mod runtime;
pub mod generate;
pub mod plan;
pub mod encode;
pub mod fold;
pub mod calib;
pub mod build;
pub mod check;
pub mod repack;
pub mod import;
pub mod eval;
pub mod measure;
pub mod control;
pub mod sensitivity;
pub mod report;
pub mod bench;
pub mod cli;
