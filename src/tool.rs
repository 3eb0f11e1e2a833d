//! The program itself, as far as it decides the bytes of an artifact.

use serde::Serialize;

use crate::digest::Digest;

/// Name, version and source of the program that builds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Tool {
    /// `tqc`.
    pub name: &'static str,
    /// Version of the package.
    pub version: &'static str,
    /// Digest of `src/`, `pipelines/`, `Cargo.toml`, `Cargo.lock` and `build.rs`, which takes it.
    pub source_sha256: Digest,
}

impl Tool {
    /// This program.
    pub fn this() -> Self {
        Self {
            name: env!("CARGO_PKG_NAME"),
            version: env!("CARGO_PKG_VERSION"),
            source_sha256: env!("TQC_SOURCE_SHA256").parse().expect("the build script writes a digest"),
        }
    }
}
