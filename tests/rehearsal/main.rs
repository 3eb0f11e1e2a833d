//! The rehearsal's checkpoint is what it claims to be.

use std::collections::BTreeSet;
use std::fs;

use safetensors::{Dtype, SafeTensors};

mod generator;

use generator::{Architecture, Filled, Tensor};

#[test]
fn the_full_scale_has_the_published_tensor_counts_and_bytes() {
    let tensors = Architecture::qwen38_27b().tensors();
    let count = |prefix: &str| tensors.iter().filter(|tensor| tensor.name.starts_with(prefix)).count();
    assert_eq!(count("model.language_model.") + count("lm_head."), 851);
    assert_eq!(count("mtp."), 15);
    assert_eq!(count("model.visual."), 333);
    assert_eq!(tensors.len(), 1199);
    assert_eq!(tensors.iter().map(Tensor::bytes).sum::<u64>(), 55_562_855_904);
}

#[test]
fn the_full_scale_takes_eleven_shards_and_almost_no_disk() {
    let folder = tempfile::tempdir().unwrap();
    let written =
        generator::write(folder.path(), &Architecture::qwen38_27b(), 11, &Filled::default()).unwrap();
    assert_eq!(written.shards, 11);

    let mut apparent = 0;
    for entry in fs::read_dir(folder.path()).unwrap() {
        let entry = entry.unwrap();
        if entry.file_name().to_string_lossy().ends_with(".safetensors") {
            apparent += entry.metadata().unwrap().len();
        }
    }
    assert!(apparent > 55_562_855_904, "{apparent} bytes of shards");
    #[cfg(target_os = "linux")]
    {
        use std::os::unix::fs::MetadataExt as _;
        let blocks: u64 = fs::read_dir(folder.path())
            .unwrap()
            .map(|entry| entry.unwrap().metadata().unwrap().blocks())
            .sum();
        assert!(blocks * 512 < 4 << 20, "{} bytes on disk", blocks * 512);
    }
}

#[test]
fn every_tensor_of_the_small_scale_reads_back_from_the_shard_that_the_index_names() {
    let folder = tempfile::tempdir().unwrap();
    let architecture = Architecture::small();
    let written = generator::write(
        folder.path(),
        &architecture,
        3,
        &Filled { layers: BTreeSet::from([0, 3]), embedding: true },
    )
    .unwrap();
    assert_eq!(written.shards, 3);

    let index = fs::read(folder.path().join("model.safetensors.index.json")).unwrap();
    let index: serde_json::Value = serde_json::from_slice(&index).unwrap();
    assert_eq!(index["metadata"]["total_size"], written.payload);
    assert_eq!(index["weight_map"].as_object().unwrap().len(), written.tensors);
    for tensor in architecture.tensors() {
        let file = index["weight_map"][&tensor.name].as_str().unwrap();
        let bytes = fs::read(folder.path().join(file)).unwrap();
        let view = SafeTensors::deserialize(&bytes).unwrap();
        let view = view.tensor(&tensor.name).unwrap();
        assert_eq!(view.dtype(), Dtype::BF16, "{}", tensor.name);
        let shape: Vec<u64> = view.shape().iter().map(|&size| size as u64).collect();
        assert_eq!(shape, tensor.shape, "{}", tensor.name);
        let filled = match tensor.layer {
            Some(layer) => [0, 3].contains(&layer),
            None => tensor.name == "model.language_model.embed_tokens.weight",
        };
        assert_eq!(view.data().iter().any(|&byte| byte != 0), filled, "{}", tensor.name);
    }
}

#[test]
fn filled_values_have_the_moments_of_a_gaussian_and_follow_from_the_name() {
    let tensor = |name: &str| Tensor { name: name.to_owned(), shape: vec![512, 512], layer: Some(0) };
    let values = |name: &str| {
        let mut bytes = Vec::new();
        tensor(name).write_values(&mut bytes).unwrap();
        assert_eq!(bytes.len(), 512 * 512 * 2);
        bytes
            .chunks_exact(2)
            .map(|pair| f64::from(f32::from_bits(u32::from(u16::from_le_bytes([pair[0], pair[1]])) << 16)))
            .collect::<Vec<_>>()
    };
    let first = values("a");
    assert_eq!(first, values("a"));
    assert_ne!(first, values("b"));

    let n = first.len() as f64;
    let mean = first.iter().sum::<f64>() / n;
    let variance = first.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / n;
    // Five standard errors: sigma / sqrt(n) of the mean, sigma^2 · sqrt(2 / n) of the variance.
    assert!(mean.abs() < 5.0 * 0.02 / n.sqrt(), "mean {mean}");
    assert!((variance / 4e-4 - 1.0).abs() < 5.0 * (2.0 / n).sqrt() + 1e-3, "variance {variance}");
    let kurtosis = first.iter().map(|v| (v - mean).powi(4)).sum::<f64>() / n / variance.powi(2);
    // Four uniform numbers: 3 - 1.2 / 4 = 2.7.
    assert!((kurtosis - 2.7).abs() < 0.05, "kurtosis {kurtosis}");
}
