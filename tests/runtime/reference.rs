//! Reads the goldens of another implementation.

use std::fs;
use std::path::Path;

use safetensors::SafeTensors;

/// One file of `goldens/runtime`.
pub struct Reference(Vec<u8>);

impl Reference {
    pub fn open(name: &str) -> Self {
        Self::file(&format!("fixtures/{name}/reference.safetensors"))
    }

    pub fn file(path: &str) -> Self {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("goldens/runtime").join(path);
        Self(fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display())))
    }

    fn tensors(&self) -> SafeTensors<'_> {
        SafeTensors::deserialize(&self.0).unwrap()
    }

    pub fn names(&self) -> Vec<String> {
        self.tensors().names().into_iter().map(str::to_owned).collect()
    }

    pub fn floats(&self, name: &str) -> Vec<f32> {
        let tensors = self.tensors();
        let tensor = tensors.tensor(name).unwrap_or_else(|e| panic!("{name}: {e}"));
        assert_eq!(tensor.dtype(), safetensors::Dtype::F32, "{name}");
        tensor.data().as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
    }

    pub fn ids(&self, name: &str) -> Vec<u32> {
        let tensors = self.tensors();
        let tensor = tensors.tensor(name).unwrap_or_else(|e| panic!("{name}: {e}"));
        assert_eq!(tensor.dtype(), safetensors::Dtype::I64, "{name}");
        tensor.data().as_chunks().0.iter().map(|bytes| i64::from_le_bytes(*bytes) as u32).collect()
    }
}
