//! Every model family, in one list.

use super::config::quoted;
use super::{Arch, ArchError, Config, dense, qwen3_5};

/// The adapters.
pub static ARCHS: &[&dyn Arch] =
    &[&dense::LLAMA, &dense::MISTRAL, &dense::QWEN2, &dense::QWEN3, &qwen3_5::QWEN3_5, &qwen3_5::QWEN3_5_MOE];

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
