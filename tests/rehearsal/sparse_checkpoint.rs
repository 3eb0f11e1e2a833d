//! Writes a sparse checkpoint with Qwen3.8-27B's names and shapes: the full-size rehearsal's source.
//!
//! `cargo run --release --example sparse-checkpoint -- --out target/rehearsal --fill-layers 0,3`

use std::io;
use std::path::PathBuf;

use clap::{Parser, ValueEnum};

#[path = "generator.rs"]
mod generator;

use generator::{Architecture, Filled};

/// Write a sparse Hugging Face checkpoint with Qwen3.8-27B's names and shapes.
#[derive(Parser)]
struct Options {
    /// Folder to write into; made if missing.
    #[arg(long)]
    out: PathBuf,
    /// The most shards to cut the payload into.
    #[arg(long, default_value_t = 11, value_parser = clap::value_parser!(u64).range(1..=99_999))]
    shards: u64,
    /// How large a model.
    #[arg(long, value_enum, default_value_t = Scale::Full)]
    scale: Scale,
    /// Layers that get pseudo-random values; the others are zeros that take no disk. A layer of the full
    /// scale takes 0.75 GB.
    #[arg(long, value_delimiter = ',', value_name = "LAYER,…")]
    fill_layers: Vec<u64>,
    /// Give the embedding such values too, 2.5 GB at the full scale: a calibration then has something to read.
    #[arg(long)]
    fill_embedding: bool,
}

#[derive(Clone, Copy, ValueEnum)]
enum Scale {
    /// Qwen3.8-27B: 55.6 GB apparent.
    Full,
    /// The same structure in a few megabytes.
    Small,
}

fn main() -> io::Result<()> {
    let options = Options::parse();
    let architecture = match options.scale {
        Scale::Full => Architecture::qwen38_27b(),
        Scale::Small => Architecture::small(),
    };
    if let Some(layer) = options.fill_layers.iter().find(|layer| **layer >= architecture.layers) {
        let problem = format!("there is no layer {layer}: the model has {}", architecture.layers);
        return Err(io::Error::new(io::ErrorKind::InvalidInput, problem));
    }
    let filled =
        Filled { layers: options.fill_layers.into_iter().collect(), embedding: options.fill_embedding };
    let written = generator::write(&options.out, &architecture, options.shards, &filled)?;
    println!(
        "{}: {} tensors in {} shards, {} payload bytes",
        options.out.display(),
        written.tensors,
        written.shards,
        written.payload
    );
    Ok(())
}
