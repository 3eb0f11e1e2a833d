//! Config values that no published fixture has, against `transformers` in f32: sliding windows, linear rope, the newer
//! spelling of rope settings, biases, numbers of chosen experts, and defaults (`goldens/runtime/variants`).

use serde_json::Value;

use super::*;
use crate::common::{Model as Source, Tensor, read_json, temp};
use crate::plain::{Plain, difference, widen};

fn put(config: &mut Value, path: &str, value: &Value) {
    let (sections, key) = path.rsplit_once('.').map_or((None, path), |(sections, key)| (Some(sections), key));
    let at = match sections {
        Some(section) => &mut config[section],
        None => config,
    };
    match value {
        Value::Null => drop(at.as_object_mut().unwrap().remove(key)),
        value => at[key] = value.clone(),
    }
}

#[test]
fn logits_under_changed_config_values_are_those_of_transformers_f32() {
    let goldens = Path::new(env!("CARGO_MANIFEST_DIR")).join("goldens/runtime/variants");
    let variants = read_json(&goldens.join("variants.json"));
    let variants = variants.as_object().unwrap();
    assert_eq!(variants.len(), 10);
    for (name, variant) in variants {
        let fixture = variant["fixture"].as_str().unwrap();
        let mut source = Source::fixture(fixture);
        for (path, value) in variant["config"].as_object().unwrap() {
            put(&mut source.config, path, value);
        }
        let golden = Reference::file(&format!("variants/{name}.safetensors"));
        for bias in golden.names().iter().filter(|name| name.ends_with(".bias")) {
            let values = golden.floats(bias);
            source.add(Tensor::of_floats(bias, &[values.len() as u64], &values));
        }
        let dir = temp();
        source.write(dir.path());
        let (model, ids) = (open(dir.path()), golden.ids("input_ids"));
        let expected = golden.floats("logits_f32");
        let found = model.forward(&mut model.state(), &ids, Want::All).unwrap().logits;
        let last = found.len() - expected.len();
        assert_close(name, &found[last..], &expected, LOGITS);

        // Token by token the window slides over whole pages, and the first of them are never looked at again.
        let (parts, _) = in_passes(&model, &ids, &[1]);
        assert_close(name, &parts[last..], &expected, LOGITS);

        // The rotary part's default is the program's to know.
        if name != "qwen3_5-default-rotary-part" {
            let plain = Plain::new(&source).forward(&ids).logits;
            let apart = difference(&plain[last..], &widen(&expected), model.config().vocab);
            assert!(apart.most < 2e-4, "{name}: the plain pass is {apart:?} from transformers");
        }
    }
}
