//! Which stored tensor lies where: file, offset, header.
//!
//! Everything here follows from names, dtypes and shapes alone, so headers and offsets are known before
//! the first weight is read, files have their final size from the start, and any row of any plane can be
//! written on its own.
//!
//! Inside a file, tensors with wider elements come first, so that each one is aligned to its element size
//! wherever the file is mapped; ties keep the order of the source. A tensor is never split, and the planes
//! of one module share a file. Headers carry `{"format": "mlx"}`, or `pt` in the Hugging Face layout: readers take it
//! for a statement about names and gains. They are padded with spaces to a multiple of
//! eight bytes.

use crate::arch::Folder;
use crate::tensor::{Dtype, Layout, Shape};

/// A tensor that the artifact will hold.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredTensor {
    /// Name in the file.
    pub name: String,
    /// Element type.
    pub dtype: Dtype,
    /// Dimensions.
    pub shape: Shape,
    /// Payload size.
    pub bytes: u64,
}

/// Where a stored tensor's payload begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// Index into the list of files.
    pub file: usize,
    /// Byte offset in that file.
    pub offset: u64,
}

/// One weight file of the artifact.
#[derive(Debug, Clone)]
pub struct OutputFile {
    /// Path relative to the artifact.
    pub name: String,
    /// Length word and header, as they are written.
    pub header: Vec<u8>,
    /// Size of the whole file.
    pub len: u64,
    /// (module, plane) in file order.
    pub order: Vec<(usize, usize)>,
}

/// The planes of one module.
#[derive(Debug, Clone)]
pub struct ModuleTensors {
    /// Which files it goes to.
    pub folder: Folder,
    /// One per plane.
    pub planes: Vec<StoredTensor>,
}

/// Assigns every plane of every module to a file and an offset; `places[module][plane]`.
///
/// Main files are filled in order up to `shard_size` bytes of payload; a module larger than that has a
/// file of its own. Each side folder has one file.
pub fn lay_out(
    modules: &[ModuleTensors],
    shard_size: u64,
    layout: Layout,
) -> (Vec<OutputFile>, Vec<Vec<Place>>) {
    let mut shards: Vec<Vec<usize>> = vec![Vec::new()];
    let mut filled = 0;
    for (module, tensors) in modules.iter().enumerate().filter(|(_, m)| m.folder == Folder::Main) {
        let bytes: u64 = tensors.planes.iter().map(|plane| plane.bytes).sum();
        if filled > 0 && filled + bytes > shard_size {
            shards.push(Vec::new());
            filled = 0;
        }
        filled += bytes;
        shards.last_mut().expect("never empty").push(module);
    }
    let count = shards.len();
    let mut members: Vec<(String, Vec<usize>)> = shards
        .into_iter()
        .enumerate()
        .map(|(i, modules)| match count {
            1 => ("model.safetensors".to_owned(), modules),
            _ => (format!("model-{:05}-of-{count:05}.safetensors", i + 1), modules),
        })
        .collect();
    for folder in Folder::SIDE {
        let inside: Vec<usize> = (0..modules.len()).filter(|i| modules[*i].folder == folder).collect();
        if !inside.is_empty() {
            members.push((format!("{}/model.safetensors", folder.path()), inside));
        }
    }

    arrange(members, modules, layout)
}

/// Lays out files whose names and modules are known; `places[module][plane]`.
pub fn arrange(
    members: Vec<(String, Vec<usize>)>,
    modules: &[ModuleTensors],
    layout: Layout,
) -> (Vec<OutputFile>, Vec<Vec<Place>>) {
    let nowhere = Place { file: 0, offset: 0 };
    let mut places: Vec<Vec<Place>> = modules.iter().map(|m| vec![nowhere; m.planes.len()]).collect();
    let mut files = Vec::new();
    for (file, (name, members)) in members.into_iter().enumerate() {
        let mut order: Vec<(usize, usize)> = members
            .iter()
            .flat_map(|m| (0..modules[*m].planes.len()).map(move |plane| (*m, plane)))
            .collect();
        order.sort_by_key(|(m, plane)| std::cmp::Reverse(modules[*m].planes[*plane].dtype.bytes()));
        let tensors: Vec<&StoredTensor> =
            order.iter().map(|(m, plane)| &modules[*m].planes[*plane]).collect();
        let header = header(&tensors, layout);
        let mut offset = header.len() as u64;
        for ((m, plane), tensor) in order.iter().zip(&tensors) {
            places[*m][*plane] = Place { file, offset };
            offset += tensor.bytes;
        }
        files.push(OutputFile { name, header, len: offset, order });
    }
    (files, places)
}

/// The length word and JSON header of a safetensors file with these tensors, in this order.
///
/// Written by hand because the order of keys, and so every byte, must not depend on a map.
pub fn header(tensors: &[&StoredTensor], layout: Layout) -> Vec<u8> {
    let quoted = |text: &str| serde_json::Value::from(text).to_string();
    let format = match layout {
        Layout::Mlx => "mlx",
        Layout::HuggingFace => "pt",
    };
    let mut json = format!("{{\"__metadata__\":{{\"format\":\"{format}\"}}");
    let mut offset = 0;
    for tensor in tensors {
        let dims = tensor.shape.0.iter().map(u64::to_string).collect::<Vec<_>>().join(",");
        let end = offset + tensor.bytes;
        json.push_str(&format!(
            ",{}:{{\"dtype\":\"{}\",\"shape\":[{dims}],\"data_offsets\":[{offset},{end}]}}",
            quoted(&tensor.name),
            tensor.dtype
        ));
        offset = end;
    }
    json.push('}');
    while json.len() % 8 != 0 {
        json.push(' ');
    }
    let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(json.as_bytes());
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plane(name: &str, dtype: Dtype, dims: [u64; 2]) -> StoredTensor {
        StoredTensor {
            name: name.to_owned(),
            dtype,
            shape: dims.into(),
            bytes: dims[0] * dims[1] * dtype.bytes(),
        }
    }

    fn module(name: &str, folder: Folder) -> ModuleTensors {
        ModuleTensors {
            folder,
            planes: vec![
                plane(&format!("{name}.weight"), Dtype::U32, [3, 4]),
                plane(&format!("{name}.scales"), Dtype::U8, [3, 1]),
                plane(&format!("{name}.bias"), Dtype::BF16, [1, 3]),
            ],
        }
    }

    #[test]
    fn what_is_laid_out_reads_back_with_the_safetensors_crate_and_is_aligned() {
        let modules = [module("a", Folder::Main), module("b", Folder::Main), module("c", Folder::Mtp)];
        let (files, places) = lay_out(&modules, 1 << 30, Layout::Mlx);
        assert_eq!(
            files.iter().map(|f| f.name.as_str()).collect::<Vec<_>>(),
            ["model.safetensors", "mtp/model.safetensors"]
        );
        for (index, file) in files.iter().enumerate() {
            let mut bytes = file.header.clone();
            bytes.resize(file.len as usize, 7);
            let read = safetensors::SafeTensors::deserialize(&bytes).unwrap();
            assert_eq!(read.len(), file.order.len());
            assert_eq!(file.header.len() % 8, 0);
            for (m, p) in &file.order {
                let (tensor, place) = (&modules[*m].planes[*p], places[*m][*p]);
                let view = read.tensor(&tensor.name).unwrap();
                assert_eq!(place.file, index);
                assert_eq!(view.data().as_ptr() as usize - bytes.as_ptr() as usize, place.offset as usize);
                assert_eq!(view.data().len() as u64, tensor.bytes);
                assert_eq!(place.offset % tensor.dtype.bytes(), 0, "{} is misaligned", tensor.name);
            }
        }
    }

    #[test]
    fn shards_are_cut_between_modules_and_numbered() {
        let modules: Vec<_> = (0..5).map(|i| module(&format!("m{i}"), Folder::Main)).collect();
        // Each module is 57 bytes; two fit in 120.
        let (files, places) = lay_out(&modules, 120, Layout::Mlx);
        let names: Vec<_> = files.iter().map(|f| f.name.as_str()).collect();
        assert_eq!(
            names,
            [
                "model-00001-of-00003.safetensors",
                "model-00002-of-00003.safetensors",
                "model-00003-of-00003.safetensors"
            ]
        );
        assert_eq!(places.iter().map(|planes| planes[0].file).collect::<Vec<_>>(), [0, 0, 1, 1, 2]);
        // A module larger than the shard size still has a file, alone.
        assert_eq!(lay_out(&modules, 1, Layout::HuggingFace).0.len(), 5);
    }
}
