//! Every model family, in one list.

use super::config::quoted;
use super::{Arch, ArchError, Config, dense, qwen3_5};

/// The adapters.
pub static ARCHS: &[&dyn Arch] =
    &[&dense::LLAMA, &dense::MISTRAL, &dense::QWEN2, &dense::QWEN3, &qwen3_5::QWEN3_5, &qwen3_5::QWEN3_5_MOE];

/// Families without an adapter whose residual stream has no other exact basis, by how their `model_type` begins, and
/// why; the first that fits counts.
const INEXACT: &[(&str, &str)] = &[
    ("gemma", "a norm on what a sublayer gives, before it is added, has a gain that no basis leaves alone"),
    ("olmo2", "a norm on what a sublayer gives, before it is added, has a gain that no basis leaves alone"),
    ("olmo3", "a norm on what a sublayer gives, before it is added, has a gain that no basis leaves alone"),
    ("glm4", "a norm on what a sublayer gives, before it is added, has a gain that no basis leaves alone"),
    ("exaone4", "a norm on what a sublayer gives, before it is added, has a gain that no basis leaves alone"),
    ("gpt", "its LayerNorm subtracts the mean, which only the stream's own basis has"),
    ("phi", "its LayerNorm subtracts the mean, which only the stream's own basis has"),
    ("stablelm", "its LayerNorm subtracts the mean, which only the stream's own basis has"),
    ("starcoder2", "its LayerNorm subtracts the mean, which only the stream's own basis has"),
    ("falcon", "its LayerNorm subtracts the mean, which only the stream's own basis has"),
    ("bloom", "its LayerNorm subtracts the mean, which only the stream's own basis has"),
    ("cohere", "attention and MLP share one LayerNorm, which subtracts the mean"),
    ("deepseek_v", "latent queries, keys and values have norms of their own between two matrices"),
];

/// Refuses a change of basis for a family that is known not to have another.
///
/// # Errors
/// [`ArchError::Inexact`].
pub fn check_exact(config: &Config) -> Result<(), ArchError> {
    let name = config.model_type()?;
    match INEXACT.iter().find(|(start, _)| name.starts_with(start)) {
        Some((_, reason)) => Err(ArchError::Inexact { model_type: name.to_owned(), reason }),
        None => Ok(()),
    }
}

/// The adapter for a config's `model_type`.
///
/// # Errors
/// [`ArchError::UnknownModelType`], with the known ones in its help.
pub fn find(config: &Config) -> Result<&'static dyn Arch, ArchError> {
    let name = config.model_type()?;
    ARCHS.iter().copied().find(|arch| arch.model_types().contains(&name)).ok_or_else(|| {
        let known: Vec<&str> = ARCHS.iter().flat_map(|arch| arch.model_types()).copied().collect();
        ArchError::UnknownModelType { found: name.to_owned(), known: quoted(&known) }
    })
}
