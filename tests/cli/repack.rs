//! `tqc repack`: what the new folder computes, which bytes it holds, and what is refused with nothing written.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::thread::sleep;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tempfile::TempDir;
use tqc::backend::Precision;
use tqc::backend::cpu::Cpu;
use tqc::codec::{CodecSpec, Matrix, Part, codec};
use tqc::digest::Digest;
use tqc::isa::Isa;
use tqc::quant::{RowLoss, Rows, quantizer};
use tqc::runtime::{Model as Runner, Want, Weights};
use tqc::tensor::{Float, Shape};

use crate::common::*;
use crate::tqc;

/// Rules for what a trellis along outputs cannot hold, and one module in affine codes that mlx-lm loads.
const SMALL: &str =
    "[[rule]]\nmatch = \"*.linear_attn.in_proj_{a,b}\"\ncodec = { affine = { bits = 8, group = 32 } }\n";
const EXPERTS: &str = "[[rule]]\nmatch = \"*gate\"\ncodec = { affine = { bits = 8, group = 32 } }\n";
const DRAFT: &str = "[[rule]]\nmatch = \"mtp.*.mlp.*\"\ncodec = { trellis = { bits = 4, states = 10 } }\n";
const QUERIES: &str = "[[rule]]\nmatch = \"*.q_proj\"\ncodec = { affine = { bits = 3, group = 32 } }\n";

fn trellis(parameters: &str, more: &str) -> String {
    format!("[default]\ncodec = {{ trellis = {{ {parameters} }} }}\nencoder = \"trellis\"\n{more}")
}

/// An artifact in a folder of its own.
struct Made {
    dir: TempDir,
}

impl Made {
    fn new(source: &Path, text: &str) -> Self {
        let dir = temp();
        let recipe = recipe(dir.path(), text);
        tqc!("build", recipe, "--source", source, "-o", dir.path().join("artifact")).expect(0);
        Self { dir }
    }

    fn small() -> Self {
        Self::new(&fixture("llama-tied"), &trellis("bits = 2, states = 10", QUERIES))
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn artifact(&self) -> PathBuf {
        self.path("artifact")
    }

    fn run(&self, to: &str, more: &[&str]) -> Run {
        let mut args = crate::args!["repack", self.artifact(), "-o", self.path(to)];
        args.extend(more.iter().map(Into::into));
        finish(command(args))
    }

    /// Repacks into `to`.
    fn repack(&self, to: &str, more: &[&str]) -> (PathBuf, Value) {
        let run = self.run(to, &[more, &["--json"]].concat()).expect(0);
        (self.path(to), run.json())
    }

    #[track_caller]
    fn refused(&self, to: &str, more: &[&str], code: i32, words: &[&str]) {
        let before = listing(self.dir.path());
        let run = self.run(to, more).expect(code);
        for word in words {
            assert!(run.stderr.contains(word), "`{word}` is not in:\n{}", run.stderr);
        }
        assert_eq!(run.stdout, "");
        assert_eq!(listing(self.dir.path()), before, "something was written");
    }
}

/// Every path below a folder.
fn listing(dir: &Path) -> Vec<PathBuf> {
    let mut paths = Vec::new();
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            paths.extend(listing(&path));
        }
        paths.push(path);
    }
    paths.sort();
    paths
}

fn logits(dir: &Path, ids: &[u32]) -> Vec<f32> {
    let weights = Weights::open(dir).unwrap_or_else(|e| panic!("{}: {e}", dir.display()));
    let model = Runner::new(weights, Cpu::new(Isa::best(), 2, Precision::Exact)).unwrap();
    model.forward(&mut model.state(), ids, Want::All).unwrap().logits
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// Mean KL(a || b) over rows of logits, nats.
fn mean_kl(a: &[f32], b: &[f32], vocab: usize) -> f64 {
    let log_p = |row: &[f32]| -> Vec<f64> {
        let most = row.iter().fold(f64::MIN, |most, x| most.max(f64::from(*x)));
        let sum: f64 = row.iter().map(|x| (f64::from(*x) - most).exp()).sum();
        row.iter().map(|x| f64::from(*x) - most - sum.ln()).collect()
    };
    let rows = a.chunks(vocab).zip(b.chunks(vocab)).map(|(a, b)| {
        let (a, b) = (log_p(a), log_p(b));
        a.iter().zip(&b).map(|(a, b)| a.exp() * (a - b)).sum::<f64>()
    });
    let kls: Vec<f64> = rows.collect();
    kls.iter().sum::<f64>() / kls.len() as f64
}

#[test]
fn in_f32_it_computes_the_same_bits_and_otherwise_nearly_the_same() {
    let ids: Vec<u32> = (0..40).map(|i| (37 * i + 11) % 480).collect();
    for (name, text) in [
        ("llama-tied", trellis("bits = 3, states = 10", QUERIES)),
        ("llama-untied", trellis("bits = 4, states = 10, along = \"inputs\", code = \"1mad\"", "")),
        ("qwen3", trellis("bits = 2, scales = \"one\", states = 11, code = \"3inst\"", "")),
        ("qwen3_5", trellis("bits = 3, states = 10", &format!("{SMALL}{DRAFT}"))),
        ("qwen3_5_moe", trellis("bits = 2, states = 10", &format!("{SMALL}{EXPERTS}"))),
    ] {
        let made = Made::new(&fixture(name), &text);
        let right = logits(&made.artifact(), &ids);
        let vocab = right.len() / ids.len();
        let (exact, _) = made.repack("f32", &["--to", "f32"]);
        assert!(bits(&logits(&exact, &ids)) == bits(&right), "{name}: f32 computes other logits");
        // What the trellis itself costs, these random models with large logits more than trained ones.
        let lost = mean_kl(&logits(&fixture(name), &ids), &right, vocab);
        for (to, part) in [("bf16", 1e-2), ("affine-8g64", 1e-1)] {
            let (near, said) = made.repack(to, &["--to", to]);
            let kl = mean_kl(&right, &logits(&near, &ids), vocab);
            assert!(kl > 0.0 && kl < part * lost, "{name} {to}: {kl}, and the trellis {lost}");
            for module in said["modules"].as_array().unwrap() {
                let mse = module["relative_mse"].as_f64().unwrap();
                assert!(mse > 0.0 && mse < 4e-4, "{name} {to}: {module}");
            }
        }
    }
}

#[test]
fn the_programs_that_run_models_take_it() {
    let made = Made::new(&fixture("qwen3_5"), &trellis("bits = 3, states = 10", &format!("{SMALL}{DRAFT}")));
    let text = made.path("text.jsonl");
    fs::write(&text, json!({ "text": "Q: Ned has 7 boxes with 21 books. The answer is 147." }).to_string())
        .unwrap();
    tqc!("eval", "dump", made.artifact(), "--text", text, "-o", made.path("dump"), "--dtype", "f32")
        .expect(0);
    let run = |dir: &Path| {
        let said =
            tqc!("generate", dir, "--prompt", "Q: Ned", "--exact", "--max-tokens", "8", "--json").expect(0);
        let drafted = tqc!(
            "generate",
            dir,
            "--prompt",
            "Q: Ned",
            "--exact",
            "--max-tokens",
            "8",
            "--json",
            "--draft",
            "mtp"
        );
        assert_eq!(drafted.expect(0).json()["tokens"], said.json()["tokens"]);
        said.json()["tokens"].clone()
    };
    let right = run(&made.artifact());
    for (to, most) in [("f32", 0.0), ("bf16", 1e-2), ("affine-8g64", 0.3)] {
        let (dir, _) = made.repack(to, &["--to", to]);
        let tokens = run(&dir);
        assert!(to != "f32" || tokens == right, "{tokens}");
        let db = made.path("eval.db");
        let said =
            tqc!("eval", "kl", "--teacher", made.path("dump"), dir, "--db", db, "--json").expect(0).json();
        let kl = said["mean_kl"].as_f64().unwrap_or_else(|| panic!("{said}"));
        assert!(kl.abs() <= most, "{to}: {kl}");
    }
}

/// What a module's tensors decode to, by arithmetic that knows no strips.
fn decoded(tensors: &BTreeMap<String, Tensor>, path: &str, spec: CodecSpec, shape: &Shape) -> Vec<f32> {
    let float = Float::Bf16;
    let planes = codec(spec).planes(Matrix::of(shape), float).unwrap();
    let stored: Vec<&[u8]> =
        planes.iter().map(|plane| tensors[&format!("{path}.{}", plane.suffix)].bytes.as_slice()).collect();
    let mut values = vec![0.0; shape.elements().unwrap() as usize];
    codec(spec).decode(Part { matrix: Matrix::of(shape), first: 0 }, float, &stored, &mut values);
    values
}

/// Everything but the modules that change is as it was; those hold what one encoding of the decoded weights gives.
#[track_caller]
fn check_bytes(artifact: &Path, folder: &Path, said: &Value, prefix: &str) -> usize {
    let (before, after) = (read_folder(&artifact.join(prefix)), read_folder(&folder.join(prefix)));
    let mut expected = before.clone();
    let mut count = 0;
    for module in said["modules"].as_array().unwrap() {
        let name = module["module"].as_str().unwrap();
        let path = match (name.strip_prefix("mtp/"), prefix) {
            (Some(path), "mtp") => path,
            (None, "") => name,
            _ => continue,
        };
        count += 1;
        let shape: Shape = serde_json::from_value(module["shape"].clone()).unwrap();
        let codec_of = |key: &str| -> CodecSpec { module[key].as_str().unwrap().parse().unwrap() };
        let (was, became) = (codec_of("was"), codec_of("became"));
        let values = decoded(&before, path, was, &shape);
        for plane in codec(was).planes(Matrix::of(&shape), Float::Bf16).unwrap() {
            expected.remove(&format!("{path}.{}", plane.suffix)).unwrap();
        }
        let layout = codec(became).planes(Matrix::of(&shape), Float::Bf16).unwrap();
        let rows = shape.rows();
        let mut planes: Vec<Vec<u8>> =
            layout.iter().map(|plane| vec![0; plane.bytes_of(plane.begun(0..rows))]).collect();
        let mut slices: Vec<&mut [u8]> = planes.iter_mut().map(Vec::as_mut_slice).collect();
        let mut losses = vec![RowLoss::default(); rows as usize];
        let in_features = shape.last() as usize;
        let encoder = quantizer(if became.quantizes() { "mlx" } else { "cast" }).unwrap();
        let rows = Rows { values: &values, in_features, float: Float::Bf16, ahead: &[] };
        encoder.fit(became, rows, Isa::Scalar, &mut slices, &mut losses).unwrap();
        for (plane, bytes) in layout.iter().zip(planes) {
            let (dtype, shape) = (plane.dtype.to_string(), plane.shape(&shape).0);
            let name = format!("{path}.{}", plane.suffix);
            expected.insert(name.clone(), Tensor::new(&name, &dtype, &shape, bytes));
        }
    }
    assert_eq!(after.keys().collect::<Vec<_>>(), expected.keys().collect::<Vec<_>>());
    for (name, tensor) in &expected {
        assert!(after[name] == *tensor, "{}: {name}", folder.display());
    }
    count
}

#[test]
fn bytes_are_one_encoding_of_the_decoded_weights_whoever_makes_them() {
    let dir = temp();
    let source = dir.path().join("source");
    // No group divides rows of 80: `down_proj` becomes bf16. Experts and rows of 160 are in the fixtures. Embedding and
    // head fill a file each, in which nothing changes.
    Model::llama(64, 80, 8192, 2).write(&source);
    let rule = |name: &str, codec: &str| format!("[[rule]]\nmatch = \"{name}\"\ncodec = {codec}\n");
    let narrow = format!(
        "[output]\nshard-size = \"1MB\"\n{}{}",
        rule("*.mlp.{gate,up}_proj", "{ affine = { bits = 8, group = 32 } }"),
        rule("{*embed_tokens,lm_head}", "\"keep\"")
    );
    for (source, text, more) in [
        (source, trellis("bits = 3, states = 10", &narrow), vec![]),
        (fixture("qwen3_5_moe"), trellis("bits = 2, states = 10", &format!("{SMALL}{EXPERTS}")), vec![]),
        (
            fixture("qwen3_5"),
            trellis("bits = 2, states = 10, along = \"inputs\"", &format!("{SMALL}{DRAFT}")),
            vec!["--all"],
        ),
        (fixture("llama-tied"), default_codec("\"mxfp4\""), vec!["--all"]),
    ] {
        let made = Made::new(&source, &text);
        for to in ["affine-8g64", "bf16", "f32"] {
            let options = [&["--to", to], more.as_slice()].concat();
            let (folder, said) = made.repack(to, &options);
            let mut count = check_bytes(&made.artifact(), &folder, &said, "");
            if made.artifact().join("mtp").exists() {
                count += check_bytes(&made.artifact(), &folder, &said, "mtp");
            }
            assert_eq!(count, said["modules"].as_array().unwrap().len());
            assert!(count > 5, "{count}");
            // Whatever the threads and the kernels.
            for run in [&["--threads", "1"], &["--threads", "3"], &["--isa", "scalar"]] {
                let (again, _) = made.repack("again", &[&options[..], run].concat());
                let same = |path: &PathBuf| {
                    let name = path.strip_prefix(&folder).unwrap();
                    path.is_dir() || fs::read(path).unwrap() == fs::read(again.join(name)).unwrap()
                };
                let paths = listing(&folder);
                assert_eq!(paths.len(), listing(&again).len());
                assert!(paths.iter().all(same), "{to} {run:?}");
                fs::remove_dir_all(again).unwrap();
            }
        }
    }
}

#[test]
fn what_64_does_not_divide_is_named() {
    let dir = temp();
    let source = dir.path().join("source");
    Model::llama(64, 80, 320, 4).write(&source);
    let narrow =
        "[[rule]]\nmatch = \"*.mlp.{gate,up}_proj\"\ncodec = { affine = { bits = 8, group = 32 } }\n";
    let made = Made::new(&source, &trellis("bits = 3, states = 10", narrow));
    let run = made.run("out", &[]).expect(0);
    let down = "model.layers.0.mlp.down_proj";
    assert!(run.stderr.contains(&format!("note: `{down}` becomes bf16")), "{}", run.stderr);
    assert!(run.stderr.contains("note: and 1 more"), "{}", run.stderr);
    for word in ["trellis-3-L10  affine-8g64       18", "trellis-3-L10  bf16               4"] {
        assert!(run.stdout.contains(word), "`{word}` is not in:\n{}", run.stdout);
    }
    let wide = Made::new(&fixture("qwen3_5"), &trellis("bits = 2, states = 10", SMALL));
    let (folder, said) = wide.repack("out", &[]);
    let became = |module: &Value| module["became"].as_str().unwrap().to_owned();
    let found: Vec<String> = said["modules"].as_array().unwrap().iter().map(became).collect();
    assert!(
        found.iter().any(|codec| codec == "affine-8g32") && found.iter().any(|codec| codec == "affine-8g64")
    );
    let config = read_json(&folder.join("config.json"));
    assert_eq!(config["quantization"], config["quantization_config"]);
    assert_eq!(config["quantization"]["group_size"], 64);
    assert_eq!(config["quantization"]["mode"], "affine");
    let embedding = &config["quantization"]["language_model.model.embed_tokens"];
    assert_eq!(*embedding, json!({ "group_size": 32, "bits": 8, "mode": "affine" }));
}

#[test]
fn the_folder_is_whole_and_no_artifact() {
    let dir = temp();
    let mut model = Model::fixture("qwen3_5");
    model.add(Tensor::random("model.steps.weight", &[3, 5], 9));
    let source = dir.path().join("source");
    model.write(&source);
    let document = |i: usize| {
        let words = "Once there was a man who had two sons, and the younger of them said to his father: "
            .repeat(i + 3);
        json!({ "text": format!("{i} {words}") }).to_string()
    };
    fs::write(dir.path().join("text.jsonl"), (0..4).map(document).collect::<Vec<_>>().join("\n")).unwrap();
    let recipe_text = format!(
        "[default]\ncodec = {{ trellis = {{ bits = 3, states = 10 }} }}\nencoder = \"ldlq\"\n{SMALL}{DRAFT}\
         [keep]\ntensors = [\"*.steps.weight\"]\n[calibration]\ntext = \"{}\"\nrows = 2\ncontext = 24\n",
        dir.path().join("text.jsonl").display(),
    );
    let made = Made::new(&source, &recipe_text);
    let (folder, said) = made.repack("new/out", &["--to", "bf16"]);
    let artifact = made.artifact();
    let names = |dir: &Path| -> Vec<PathBuf> {
        listing(dir).iter().map(|path| path.strip_prefix(dir).unwrap().to_owned()).collect()
    };
    let mut expected = names(&artifact);
    assert!(expected.iter().any(|name| name == Path::new("calibration.ngrams")));
    assert!(expected.iter().any(|name| name == Path::new("kept/model.safetensors")));
    expected.retain(|name| name != Path::new("provenance.json") && name != Path::new("machine.json"));
    expected.push("repacked.json".into());
    expected.sort();
    assert_eq!(names(&folder), expected);
    for name in ["tokenizer.json", "calibration.ngrams", "kept/model.safetensors"] {
        assert_eq!(fs::read(folder.join(name)).unwrap(), fs::read(artifact.join(name)).unwrap(), "{name}");
    }

    let record = read_json(&folder.join("repacked.json"));
    let file = |path: &Path| Digest::of(&fs::read(path).unwrap()).to_string();
    assert_eq!(said["digest"], file(&folder.join("repacked.json")));
    assert_eq!(record["source"]["digest"], file(&artifact.join("provenance.json")));
    assert_eq!(record["modules"], said["modules"]);
    let files = record["files"].as_object().unwrap();
    assert_eq!(files.len() + 1, expected.iter().filter(|name| folder.join(name).is_file()).count());
    for (name, digest) in files {
        assert_eq!(*digest, file(&folder.join(name)), "{name}");
    }

    let (old, new) = (read_json(&artifact.join("config.json")), read_json(&folder.join("config.json")));
    // What is left packed is what mlx-lm loads; every other module of the text model is a float.
    assert_eq!(new["quantization"]["mode"], "affine");
    let mut rest = [old, new];
    rest.iter_mut().for_each(|config| {
        config.as_object_mut().unwrap().retain(|key, _| !key.starts_with("quantization"));
    });
    assert_eq!(rest[0], rest[1]);
    assert!(read_json(&artifact.join("mtp/config.json")).get("quantization").is_some());
    assert!(read_json(&folder.join("mtp/config.json")).get("quantization").is_none());
    let index = |dir: &Path| read_json(&dir.join("model.safetensors.index.json"));
    assert_eq!(
        index(&folder)["metadata"]["total_parameters"],
        index(&artifact)["metadata"]["total_parameters"]
    );
    let stored: u64 = read_folder(&folder).values().map(|tensor| tensor.bytes.len() as u64).sum();
    assert_eq!(index(&folder)["metadata"]["total_size"], stored);
    assert_eq!(index(&folder)["weight_map"].as_object().unwrap().len(), read_folder(&folder).len());
    let card = fs::read_to_string(folder.join("README.md")).unwrap();
    assert!(
        card.starts_with("---\nlibrary_name: mlx\n") && card.contains("| trellis-3-L10 | bf16 |"),
        "{card}"
    );
    tqc!("verify", folder).expect(3);
    tqc!("repack", folder, "-o", made.path("twice")).expect(3);
    let inspected = tqc!("inspect", folder, "--json").expect(0).json();
    assert_eq!(inspected["kind"], "mlx");
}

#[test]
fn wrong_requests_and_bad_artifacts_are_refused_with_nothing_written() {
    let made = Made::small();
    made.refused("new/out", &["--to", "affine-4g64"], 2, &["affine-4g64", "affine-8g64", "bf16", "f32"]);
    made.refused("artifact", &[], 2, &["`", "exists already", "help: "]);
    fs::write(made.path("file"), "words").unwrap();
    made.refused("file", &[], 2, &["exists already"]);
    fs::create_dir(made.path(".out.repacking")).unwrap();
    fs::write(made.path(".out.repacking/chapter.txt"), "words").unwrap();
    made.refused("out", &[], 2, &[".out.repacking", "holds what `tqc` did not put there"]);
    for (folder, code, words) in
        [("absent", 2, "there is no folder"), ("file", 2, "there is no folder"), (".", 3, "not an artifact")]
    {
        let run = tqc!("repack", made.path(folder), "-o", made.path("new/out")).expect(code);
        assert!(run.stderr.contains(words), "{}", run.stderr);
        assert!(!made.path("new").exists());
    }
    let source = tqc!("repack", fixture("llama-tied"), "-o", made.path("new/out")).expect(3);
    assert!(source.stderr.contains("provenance.json"), "{}", source.stderr);

    let plain = Made::new(&fixture("llama-tied"), &default_codec(AFFINE_4_32));
    plain.refused("new/out", &[], 2, &["nothing to repack", "stock mlx-lm loads", "`--all`"]);
    plain.repack("all", &["--all"]);
    let floats = Made::new(&fixture("llama-tied"), &default_codec("\"bf16\""));
    floats.refused("new/out", &["--all"], 2, &["nothing to repack", "no module is packed"]);

    let weights = made.path("artifact/model.safetensors");
    let whole = fs::read(&weights).unwrap();
    flip_byte(&weights, whole.len() - 3);
    made.refused("new/out", &[], 3, &["model.safetensors", "has SHA-256"]);
    fs::write(&weights, &whole[..whole.len() - 2]).unwrap();
    made.refused("new/out", &[], 3, &["model.safetensors", "has SHA-256"]);
    fs::remove_file(&weights).unwrap();
    made.refused("new/out", &[], 3, &["model.safetensors"]);

    // A record that agrees with what cannot be decoded.
    let module = "model.layers.1.mlp.up_proj";
    let mut tensors = read_whole(&whole);
    let scales = tensors.iter_mut().find(|tensor| tensor.name == format!("{module}.scales2")).unwrap();
    scales.bytes[2 * 7..2 * 8].copy_from_slice(&0x7c00u16.to_le_bytes());
    write_safetensors(&weights, &tensors);
    record_anew(&made.artifact(), "model.safetensors");
    made.refused("new/out", &[], 3, &[module, "row 7", "NaN or infinity"]);
    let scales = tensors.iter_mut().find(|tensor| tensor.name == format!("{module}.scales2")).unwrap();
    scales.shape = vec![scales.shape[0] / 2, 2];
    write_safetensors(&weights, &tensors);
    record_anew(&made.artifact(), "model.safetensors");
    made.refused("new/out", &[], 3, &[&format!("{module}.scales2"), "[128, 2]", "[256]"]);
}

/// Tensors of a file's bytes, in order.
fn read_whole(bytes: &[u8]) -> Vec<Tensor> {
    let dir = temp();
    let path = dir.path().join("model.safetensors");
    fs::write(&path, bytes).unwrap();
    read_safetensors(&path)
}

/// Writes the digest of a file into the record.
fn record_anew(artifact: &Path, name: &str) {
    let path = artifact.join("provenance.json");
    let mut record = read_json(&path);
    record["files"][name] = json!(Digest::of(&fs::read(artifact.join(name)).unwrap()).to_string());
    write_json(&path, &record);
}

/// An artifact that takes one thread a while to expand.
fn large() -> Made {
    let dir = temp();
    let source = dir.path().join("source");
    Model::llama(512, 2048, 16384, 4).write(&source);
    Made::new(&source, &trellis("bits = 1, states = 10", ""))
}

fn send(signal: &str, to: &std::process::Child) {
    let sent = std::process::Command::new("kill").args([signal, &to.id().to_string()]).status();
    assert!(sent.unwrap().success());
}

#[test]
fn an_interrupt_or_a_kill_leaves_nothing_of_it_to_be_seen() {
    let made = large();
    let growing = made.path("new/.out.repacking/out/model.safetensors");
    let spawn = || {
        let mut args = crate::args!["repack", made.artifact(), "-o", made.path("new/out"), "--to", "f32"];
        args.extend(["--threads", "1"].iter().map(Into::into));
        let child = command(args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let deadline = Instant::now() + Duration::from_secs(60);
        while !growing.exists() {
            assert!(Instant::now() < deadline, "nothing is written");
            sleep(Duration::from_millis(1));
        }
        // It is stopped while it writes, or it may be done before anybody has looked.
        send("-STOP", &child);
        child
    };
    let before = listing(made.dir.path());
    for signal in ["-INT", "-TERM"] {
        let child = spawn();
        send(signal, &child);
        send("-CONT", &child);
        let output = child.wait_with_output().unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(130), "{signal}: {stderr}");
        assert!(stderr.contains("error: interrupted"), "{stderr}");
        assert!(output.stdout.is_empty());
        assert_eq!(listing(made.dir.path()), before, "{signal}");
    }
    let mut child = spawn();
    // Another one of the same target waits for nobody.
    let run = made.run("new/out", &[]).expect(2);
    assert!(run.stderr.contains("is being written by another process"), "{}", run.stderr);
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(growing.exists() && !made.path("new/out").exists());
    let (folder, _) = made.repack("new/out", &["--to", "f32"]);
    assert!(folder.join("repacked.json").exists());
    assert!(!made.path("new/.out.repacking").exists());
}
