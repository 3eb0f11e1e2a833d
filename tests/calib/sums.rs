//! Sums and losses, computed again in f64.

use std::collections::BTreeMap;

use tqc::backend::Precision;
use tqc::backend::cpu::Cpu;
use tqc::calib::rows;
use tqc::runtime::{Model as Running, Observer, Want, Weights};

use crate::*;

/// Inputs of every linear layer, row by row.
#[derive(Default)]
struct Seen(BTreeMap<String, Vec<Vec<f32>>>);

impl Observer for Seen {
    fn linear_input(&mut self, layer: &str, modules: &[&str], values: &[f32]) {
        for module in modules {
            let rows = self.0.entry(format!("{layer}.{module}")).or_default();
            rows.push(values.to_vec());
        }
    }
}

/// Σ x xᵀ in f64.
fn moment(parts: &[Vec<f32>], n: usize) -> Vec<f64> {
    let mut sum = vec![0.0; n * n];
    for x in parts.iter().flat_map(|part| part.chunks_exact(n)) {
        for i in 0..n {
            for j in 0..n {
                sum[i * n + j] += f64::from(x[i]) * f64::from(x[j]);
            }
        }
    }
    sum
}

/// The moments that `tqc calibrate` writes: name to values.
fn exported(dir: &Path, text: &str, source: &Path) -> (PathBuf, Value, BTreeMap<String, Tensor>) {
    let out = dir.join("moments");
    let path = recipe(dir, text);
    tqc!["calibrate", path, "--source", source, "-o", out, "--json"].expect(0);
    let contents = read_json(&out.join("hessians.json"));
    let tensors = read_folder(&out);
    (out, contents, tensors)
}

#[test]
fn second_moments_are_those_of_the_inputs_of_each_row_on_its_own() {
    for name in ["llama-untied", "qwen2", "qwen3_5", "qwen3_5-tied", "qwen3_5_moe"] {
        let dir = temp();
        text(dir.path());
        let recipe = recipe_text("gptq", 4, "", "");
        let plan = planned(dir.path(), &recipe, &fixture(name));
        let weights = Weights::open(&fixture(name)).unwrap_or_else(|e| panic!("{e}"));
        let rows =
            rows(&plan, weights.decoder.context, weights.decoder.vocab).unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(rows.rows.len(), 8, "{name}");
        let (head, hidden) = (weights.head_path(), weights.decoder.hidden);
        let cpu = Cpu::new(Isa::best(), 1, Precision::Exact);
        let model = Running::new(weights, cpu).unwrap_or_else(|e| panic!("{e}"));
        let mut seen = Seen::default();
        for row in &rows.rows {
            let mut state = model.state();
            let pass = model.forward_observed(&mut state, row, Want::All, &mut seen);
            seen.0.entry(head.clone()).or_default().push(pass.unwrap_or_else(|e| panic!("{e}")).hidden);
        }
        let (_, contents, tensors) = exported(dir.path(), &recipe, &fixture(name));
        let mut named = 0;
        for input in contents["inputs"].as_array().unwrap() {
            let base = input["name"].as_str().unwrap();
            let found = tensors[&format!("{base}.hessian")].floats();
            let n = found.len().isqrt();
            for module in input["modules"].as_array().unwrap() {
                let mut module = module.as_str().unwrap().to_owned();
                if let Some(expert) = input["expert"].as_u64() {
                    let (path, last) = module.rsplit_once('.').unwrap();
                    module = format!("{path}.{expert}.{last}");
                }
                let parts =
                    seen.0.remove(&module).unwrap_or_else(|| panic!("{name}: nothing seen of {module}"));
                let tokens: usize = parts.iter().map(|part| part.len() / n).sum();
                assert_eq!(input["tokens"], tokens, "{name}, {module}");
                let expected = moment(&parts, n);
                let size = (0..n).map(|i| expected[i * n + i]).fold(0.0, f64::max);
                for (found, expected) in found.iter().zip(&expected) {
                    // Some hundred products of f32, each summed with a relative error of 2^-24 a step.
                    assert!(
                        (f64::from(*found) - expected).abs() <= 2e-5 * size,
                        "{name}, {module}: {found} {expected}"
                    );
                }
                named += 1;
            }
            let magnitude = tensors[&format!("{base}.magnitude")].floats();
            assert_eq!(magnitude.len(), n);
            assert!(magnitude.iter().all(|sum| *sum >= 0.0) && magnitude.iter().any(|sum| *sum > 0.0));
        }
        // What was seen and is not in the files is no linear layer of its own rows: experts that saw nothing.
        assert!(named >= 14 && seen.0.is_empty(), "{name}: left {:?}", seen.0.keys());
        assert_eq!(hidden, model.config().hidden);
    }
}

/// tr(E H Eᵀ) over tr(W H Wᵀ) of a weight and what is stored for it.
fn share(weight: &[f32], stored: &[f32], h: &[f32], n: usize) -> f64 {
    let weighed = |rows: &mut dyn Iterator<Item = Vec<f64>>| {
        let mut sum = 0.0;
        for row in rows {
            for i in 0..n {
                let along: f64 = (0..n).map(|j| f64::from(h[i * n + j]) * row[j]).sum();
                sum += row[i] * along;
            }
        }
        sum
    };
    let wide = |row: &[f32]| row.iter().map(|w| f64::from(*w)).collect::<Vec<_>>();
    let pairs = weight.chunks_exact(n).zip(stored.chunks_exact(n));
    let errors = &mut pairs.map(|(w, s)| wide(w).iter().zip(wide(s)).map(|(w, s)| w - s).collect());
    weighed(errors) / weighed(&mut weight.chunks_exact(n).map(wide))
}

#[test]
fn the_recorded_loss_is_that_of_what_is_stored_and_below_that_of_rounding_to_nearest() {
    let dir = temp();
    text(dir.path());
    let source = fixture("llama-untied");
    let weights = read_folder(&source);
    let (_, contents, moments) = exported(dir.path(), &recipe_text("gptq", 4, "", ""), &source);
    let of = |module: &str| {
        let inputs = contents["inputs"].as_array().unwrap();
        let input =
            inputs.iter().find(|input| input["modules"].as_array().unwrap().iter().any(|m| m == module));
        moments[&format!("{}.hessian", input.expect(module)["name"].as_str().unwrap())].floats()
    };
    let decoded = |artifact: &Path| {
        let weights = Weights::open(artifact).unwrap_or_else(|e| panic!("{e}"));
        move |module: &str| {
            let packed = weights.packed(module).unwrap();
            let mut values = vec![0.0; packed.out_features * packed.in_features];
            packed.decode(0..packed.out_features, &mut values);
            values
        }
    };
    for bits in [2, 3, 4] {
        let mut last: BTreeMap<String, Vec<f32>> = BTreeMap::new();
        for encoder in ["mlx", "gptq", "gptq-refit"] {
            let (artifact, said) =
                built(dir.path(), encoder, &recipe_text(encoder, bits, "", ""), &source, &[]);
            let decoded = decoded(&artifact);
            let records = said["calibration"]["modules"].as_array().cloned().unwrap_or_default();
            assert_eq!(records.is_empty(), encoder == "mlx");
            let (mut sum, mut count) = (0.0, 0);
            for record in records {
                let module = record["module"].as_str().unwrap();
                let h = of(module);
                let n = h.len().isqrt();
                let weight = weights[&format!("{module}.weight")].floats();
                let found = share(&weight, &decoded(module), &h, n);
                let (loss, nearest) = (record["loss"].as_f64().unwrap(), record["nearest"].as_f64().unwrap());
                assert!(
                    (found - loss).abs() <= 1e-3 * loss,
                    "{module}, {bits} bits, {encoder}: {found} {loss}"
                );
                assert!(loss <= nearest, "{module}, {bits} bits, {encoder}: {loss} of {nearest}");
                if encoder == "gptq" {
                    // The same by the artifact of the encoder that stands in.
                    let plain = self::share(&weight, &last[module], &h, n);
                    assert!((plain - nearest).abs() <= 1e-3 * nearest, "{module}: {plain} {nearest}");
                }
                (sum, count) = (sum + loss / nearest, count + 1);
            }
            if encoder == "mlx" {
                let modules = weights.keys().filter_map(|name| name.strip_suffix(".weight"));
                let matrices = modules.filter(|module| module.contains("proj") || *module == "lm_head");
                last = matrices.map(|module| (module.to_owned(), decoded(module))).collect();
            } else {
                // 192 rows of tokens for matrices of up to 512 channels leave much room.
                assert!(sum / f64::from(count) < 0.7, "{bits} bits, {encoder}: {}", sum / f64::from(count));
            }
        }
    }
}

#[test]
fn experts_are_counted_and_those_that_saw_little_are_named() {
    let dir = temp();
    text(dir.path());
    let source = fixture("qwen3_5_moe");
    let recipe = |calibration: &str| recipe_text("gptq", 4, calibration, "");
    let (_, all) = built(dir.path(), "all", &recipe("expert-tokens = 0"), &source, &[]);
    let (_, shared) = built(dir.path(), "shared", &recipe("expert-tokens = 100000"), &source, &[]);
    let few = "expert-tokens = 100000\nfew-tokens = \"nearest\"";
    let (out, nearest) = built(dir.path(), "nearest", &recipe(few), &source, &[]);
    let experts = |said: &Value| -> Vec<Value> {
        let modules = said["calibration"]["modules"].as_array().unwrap();
        modules.iter().filter(|m| !m["experts"].as_array().unwrap().is_empty()).cloned().collect()
    };
    let notes = |said: &Value, kind: &str| {
        let notes = said["notes"].as_array().unwrap();
        notes.iter().filter(|note| note["kind"] == kind).count()
    };
    let (chosen, tokens) = (2, all["calibration"]["text"]["tokens"].as_u64().unwrap());
    for module in experts(&all) {
        let counts = module["experts"].as_array().unwrap();
        let sum: u64 = counts.iter().map(|expert| expert["tokens"].as_u64().unwrap()).sum();
        assert_eq!((sum, module["tokens"].as_u64().unwrap()), (chosen * tokens, chosen * tokens), "{module}");
    }
    assert_eq!(notes(&all, "few-tokens"), 0);
    assert_eq!(notes(&shared, "few-tokens"), experts(&shared).len());
    assert!(experts(&nearest).iter().all(|module| module["damping"].is_null()));
    assert_ne!(all["digest"], shared["digest"]);
    assert_ne!(nearest["digest"], shared["digest"]);
    // Rounded to nearest, they have the bytes that `mlx` gives.
    let (plain, _) = built(dir.path(), "plain", &recipe_text("mlx", 4, "", ""), &source, &[]);
    let (left, right) = (read_folder(&out), read_folder(&plain));
    let expert_tensors: Vec<_> = left.keys().filter(|name| name.contains("switch_mlp")).collect();
    assert!(!expert_tensors.is_empty());
    for name in expert_tensors {
        assert_eq!(left[name], right[name], "{name}");
    }
    // A config that promises no vision tower has no note of its absence.
    let text_only = dir.path().join("text-only");
    let mut model = Model::fixture("qwen3_5_moe");
    model.config.as_object_mut().unwrap().remove("vision_config");
    model.write(&text_only);
    let (source, path) = (text_only, crate::recipe(dir.path(), &recipe("expert-tokens = 100000")));
    let run = tqc!["build", path, "--source", source, "-o", dir.path().join("strict"), "--strict"].expect(2);
    assert!(run.stderr.contains("notes are errors under `--strict`"), "{}", run.stderr);
}
