//! Folders of models, damaged: opening one and running a token gives an error or finite logits; never a panic, and never
//! a request for memory that the stored tensors do not call for.

use std::alloc::{GlobalAlloc, Layout, System};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock, PoisonError};

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::Index;
use serde_json::{Value, json};
use tempfile::TempDir;
use tqc::artifact::open::Artifact;
use tqc::backend::Precision;
use tqc::backend::cpu::Cpu;
use tqc::failure::Outcome;
use tqc::isa::Isa;
use tqc::runtime::{Model, Want, Weights};

use crate::common::{AFFINE_4_32, copy_folder, default_codec, fixture, fixtures, raw_header, recipe, temp};
use crate::header::{apply, damage};
use crate::tqc;

/// The fixtures have 3 MB of weights: nothing that is made of them is as large as this.
const MOST: usize = 64 << 20;

/// Refuses single requests that are too large: the process then aborts and says for how much was asked.
struct Capped;

// SAFETY: every call is passed on to the system's allocator unchanged, or answered with null, which is allowed.
unsafe impl GlobalAlloc for Capped {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if layout.size() > MOST {
            return std::ptr::null_mut();
        }
        // SAFETY: the caller keeps the contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if layout.size() > MOST {
            return std::ptr::null_mut();
        }
        // SAFETY: as above.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        if size > MOST {
            return std::ptr::null_mut();
        }
        // SAFETY: as above.
        unsafe { System.realloc(at, layout, size) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static CAPPED: Capped = Capped;

/// A folder to be damaged, one change at a time.
struct Folder {
    _dir: TempDir,
    path: PathBuf,
    /// What its files hold while they are whole.
    files: BTreeMap<String, Vec<u8>>,
    turn: Mutex<()>,
}

impl Folder {
    fn new(dir: TempDir, path: PathBuf) -> Self {
        let read = |name: String| fs::read(path.join(&name)).ok().map(|bytes| (name, bytes));
        let small = ["config.json", "mtp/config.json", "provenance.json"].map(str::to_owned);
        let files = small.into_iter().chain(weight_files(&path)).filter_map(read).collect();
        Self { _dir: dir, path, files, turn: Mutex::new(()) }
    }

    fn json(&self, file: &str) -> Value {
        serde_json::from_slice(&self.files[file]).unwrap()
    }

    /// Its weight files.
    fn weights(&self) -> Vec<&String> {
        self.files.keys().filter(|name| name.ends_with(".safetensors")).collect()
    }

    /// Looks at the folder with `bytes` in the place of a file.
    fn with(&self, file: &str, bytes: &[u8]) -> Result<bool, TestCaseError> {
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        fs::write(self.path.join(file), bytes).unwrap();
        let checked = std::panic::catch_unwind(|| check(&self.path));
        fs::write(self.path.join(file), &self.files[file]).unwrap();
        checked.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }
}

/// Every fixture, and artifacts of some.
fn folders() -> &'static [Folder] {
    static FOLDERS: OnceLock<Vec<Folder>> = OnceLock::new();
    FOLDERS.get_or_init(|| {
        let copy = |name: String| {
            let dir = temp();
            copy_folder(&fixture(&name), dir.path());
            let path = dir.path().to_owned();
            Folder::new(dir, path)
        };
        let build = |(name, codec): (&str, &str)| {
            let dir = temp();
            let (recipe, path) = (recipe(dir.path(), &default_codec(codec)), dir.path().join("out"));
            tqc!("build", recipe, "--source", fixture(name), "-o", path).expect(0);
            Folder::new(dir, path)
        };
        let built = [
            ("qwen3_5", AFFINE_4_32),
            ("llama-untied", "\"mxfp4\""),
            ("qwen3_5-tied", "\"keep\""),
            ("qwen3_5_moe", "{ affine = { bits = 3, group = 32 } }"),
        ];
        fixtures().into_iter().map(copy).chain(built.into_iter().map(build)).collect()
    })
}

/// One of them.
fn folder(at: &Index) -> &'static Folder {
    at.get(folders())
}

fn run(dir: &Path) -> Outcome<Vec<f32>> {
    let model = Model::new(Weights::open(dir)?, Cpu::new(Isa::best(), 1, Precision::Exact))?;
    model.check_prompt(&[1, 2, 3])?;
    let pass = model.forward(&mut model.state(), &[1, 2, 3], Want::Last)?;
    if let Ok(head) = model.draft() {
        head.forward(&model, &mut head.state(&model), &[2], &pass.hidden)?;
    }
    assert_eq!(pass.logits.len(), model.config().vocab);
    Ok(pass.logits)
}

/// An error that says something, or finite logits. Whether it was accepted.
fn check(dir: &Path) -> Result<bool, TestCaseError> {
    match run(dir) {
        Ok(logits) => {
            prop_assert!(logits.iter().all(|logit| logit.is_finite()));
            Ok(true)
        }
        Err(error) => {
            let text = error.to_string();
            prop_assert!(!text.is_empty() && text.len() < 50_000, "{} bytes", text.len());
            Ok(false)
        }
    }
}

/// One change of a JSON tree.
#[derive(Debug, Clone)]
enum Change {
    Remove(Index),
    Put(Index, Value),
    Insert(Index, &'static str, Value),
    Swap(Index, Index),
    Scale(Index, i64, i64),
}

fn value() -> impl Strategy<Value = Value> {
    let numbers = prop::sample::select(vec![
        json!(0),
        json!(1),
        json!(2),
        json!(3),
        json!(7),
        json!(-1),
        json!(0.5),
        json!(1.0),
        json!(1e308),
        json!(1e-308),
        json!(-0.0),
        json!(1u64 << 21),
        json!((1u64 << 21) + 1),
        json!(1u64 << 32),
        json!(1u64 << 53),
        json!(u64::MAX),
        json!(i64::MIN),
    ]);
    let words = prop::sample::select(vec![
        json!(""),
        json!("default"),
        json!("linear"),
        json!("llama3"),
        json!("yarn"),
        json!("mrope"),
        json!("mxfp4"),
        json!("nvfp4"),
        json!("affine"),
        json!("llama"),
        json!("mistral"),
        json!("qwen2"),
        json!("qwen3"),
        json!("qwen3_5"),
        json!("qwen3_5_moe"),
        json!("full_attention"),
        json!("sliding_attention"),
        json!("auto"),
        json!("float32"),
        json!("F32"),
        json!("U32"),
        json!("é\u{0}\u{1b}[31m"),
    ]);
    let others = prop::sample::select(vec![
        json!(null),
        json!(true),
        json!(false),
        json!([]),
        json!({}),
        json!([0, 0]),
        json!([[[]]]),
        json!({ "a": {} }),
        json!({ "rope_type": "linear", "factor": 1e-300 }),
        json!({ "rope_theta": 1e-300 }),
        json!({ "rope_theta": 1e300, "rope_type": "default" }),
        json!({ "bits": 4, "group_size": 32 }),
        json!({ "bits": 8, "group_size": 64, "mode": "affine" }),
    ]);
    prop_oneof![4 => numbers, 2 => words, 3 => others, 1 => any::<u64>().prop_map(Value::from), 1 => any::<f64>().prop_map(|n| json!(n))]
}

fn change() -> impl Strategy<Value = Change> {
    let key = prop::sample::select(vec![
        "rope_scaling",
        "rope_parameters",
        "rope_theta",
        "partial_rotary_factor",
        "quantization",
        "quantization_config",
        "layer_types",
        "sliding_window",
        "use_sliding_window",
        "max_window_layers",
        "attention_bias",
        "mlp_bias",
        "tie_word_embeddings",
        "head_dim",
        "num_key_value_heads",
        "text_config",
        "vision_config",
        "mode",
        "bits",
        "group_size",
        "model.embed_tokens",
        "mtp_num_hidden_layers",
        "full_attention_interval",
        "image_token_id",
        "max_position_embeddings",
        "rms_norm_eps",
        "torch_dtype",
        "dtype",
        "x",
    ]);
    prop_oneof![
        2 => any::<Index>().prop_map(Change::Remove),
        6 => (any::<Index>(), value()).prop_map(|(at, value)| Change::Put(at, value)),
        3 => (any::<Index>(), key, value()).prop_map(|(at, key, value)| Change::Insert(at, key, value)),
        1 => any::<[Index; 2]>().prop_map(|[a, b]| Change::Swap(a, b)),
        4 => (any::<Index>(), prop::sample::select(vec![(2, 0), (1, 1), (1, -1), (3, 0), (0, 1)]))
            .prop_map(|(at, (by, plus))| Change::Scale(at, by, plus)),
    ]
}

fn pointers(value: &Value, at: &str, all: &mut Vec<String>) {
    let below = |key: &str| format!("{at}/{}", key.replace('~', "~0").replace('/', "~1"));
    match value {
        Value::Object(map) => map.iter().for_each(|(key, value)| pointers(value, &below(key), all)),
        Value::Array(list) => {
            list.iter().enumerate().for_each(|(i, v)| pointers(v, &below(&i.to_string()), all))
        }
        _ => {}
    }
    if !at.is_empty() {
        all.push(at.to_owned());
    }
}

fn edit(tree: &mut Value, change: &Change) {
    let mut all = Vec::new();
    pointers(tree, "", &mut all);
    if all.is_empty() {
        return;
    }
    let place = |at: &Index| all[at.index(all.len())].clone();
    match change {
        Change::Remove(at) => {
            let pointer = place(at);
            let (parent, key) = pointer.rsplit_once('/').unwrap();
            let key = key.replace("~1", "/").replace("~0", "~");
            match tree.pointer_mut(parent) {
                Some(Value::Object(map)) => drop(map.remove(&key)),
                Some(Value::Array(list)) => drop(list.remove(key.parse().unwrap())),
                _ => {}
            }
        }
        Change::Put(at, value) => *tree.pointer_mut(&place(at)).unwrap() = value.clone(),
        Change::Insert(at, key, value) => {
            let mut objects: Vec<String> =
                all.iter().filter(|at| tree.pointer(at).is_some_and(Value::is_object)).cloned().collect();
            objects.push(String::new());
            let into = &objects[at.index(objects.len())];
            tree.pointer_mut(into).unwrap().as_object_mut().unwrap().insert((*key).to_owned(), value.clone());
        }
        Change::Swap(a, b) => {
            let (a, b) = (place(a), place(b));
            let (at_a, at_b) = (tree.pointer(&a).unwrap().clone(), tree.pointer(&b).unwrap().clone());
            *tree.pointer_mut(&a).unwrap() = at_b;
            if let Some(at) = tree.pointer_mut(&b) {
                *at = at_a;
            }
        }
        Change::Scale(at, by, plus) => {
            let numbers: Vec<&String> =
                all.iter().filter(|at| tree.pointer(at).is_some_and(Value::is_i64)).collect();
            if let Some(at) = numbers.get(at.index(numbers.len().max(1))) {
                let value = tree.pointer_mut(at).unwrap();
                *value = json!(value.as_i64().unwrap().wrapping_mul(*by).wrapping_add(*plus));
            }
        }
    }
}

/// The header of a safetensors file as JSON, and its data.
fn split(bytes: &[u8]) -> (Value, &[u8]) {
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    (serde_json::from_slice(&bytes[8..8 + length]).unwrap(), &bytes[8 + length..])
}

/// The weight files of a folder.
fn weight_files(folder: &Path) -> Vec<String> {
    let list = |sub: &str| -> Vec<String> {
        let entries =
            fs::read_dir(folder.join(sub)).into_iter().flatten().map(|entry| entry.unwrap().file_name());
        let names = entries.map(|name| format!("{sub}{}", name.into_string().unwrap()));
        names.filter(|name| name.ends_with(".safetensors")).collect()
    };
    let mut files = [list(""), list("mtp/")].concat();
    files.sort();
    files
}

fn cases(cases: u32) -> ProptestConfig {
    ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() }
}

#[test]
fn the_folders_are_accepted_before_they_are_damaged() {
    for folder in folders() {
        let accepted = folder.with("config.json", &folder.files["config.json"]).unwrap();
        assert!(accepted, "{}", folder.path.display());
    }
}

proptest! {
    #![proptest_config(cases(1500))]

    #[test]
    fn a_changed_config_is_refused_or_runs(at in any::<Index>(), changes in vec(change(), 1..4), draft in 0..4) {
        let folder = folder(&at);
        let draft = draft == 0 && folder.files.contains_key("mtp/config.json");
        let file = if draft { "mtp/config.json" } else { "config.json" };
        let mut config = folder.json(file);
        changes.iter().for_each(|change| edit(&mut config, change));
        folder.with(file, config.to_string().as_bytes())?;
    }

    #[test]
    fn a_damaged_config_is_refused_or_runs(at in any::<Index>(), damages in vec(damage(), 1..4)) {
        let folder = folder(&at);
        let mut bytes = folder.files["config.json"].clone();
        damages.iter().for_each(|damage| apply(&mut bytes, damage));
        folder.with("config.json", &bytes)?;
    }
}

proptest! {
    #![proptest_config(cases(300))]

    #[test]
    fn a_changed_header_of_weights_is_refused_or_runs(
        at in any::<Index>(), file in any::<Index>(), changes in vec(change(), 1..3),
    ) {
        let folder = folder(&at);
        let file = *file.get(&folder.weights());
        let (mut header, data) = split(&folder.files[file]);
        changes.iter().for_each(|change| edit(&mut header, change));
        folder.with(file, &[raw_header(&header.to_string()).as_slice(), data].concat())?;
    }

    #[test]
    fn a_damaged_header_of_weights_is_refused_or_runs(
        at in any::<Index>(), file in any::<Index>(), damages in vec(damage(), 1..3),
    ) {
        let folder = folder(&at);
        let file = *file.get(&folder.weights());
        let bytes = &folder.files[file];
        // Damage to the header alone, with the data behind it.
        let (head, data) = bytes.split_at(bytes.len() - split(bytes).1.len());
        let mut head = head.to_vec();
        damages.iter().for_each(|damage| apply(&mut head, damage));
        folder.with(file, &[&head, data].concat())?;
    }

    #[test]
    fn changed_weights_are_refused_or_run(
        at in any::<Index>(), file in any::<Index>(), places in vec((any::<Index>(), any::<[u8; 4]>()), 1..40),
    ) {
        let folder = folder(&at);
        let file = *file.get(&folder.weights());
        let mut bytes = folder.files[file].clone();
        let data = split(&bytes).1.len();
        let start = bytes.len() - data;
        for (at, value) in places {
            bytes[start + at.index(data - 4)..][..4].copy_from_slice(&value);
        }
        folder.with(file, &bytes)?;
    }

    #[test]
    fn a_changed_record_is_refused_or_names_files_below_it(artifact in 0usize..4, changes in vec(change(), 1..3)) {
        let mut record = folders()[folders().len() - 1 - artifact].json("provenance.json");
        changes.iter().for_each(|change| edit(&mut record, change));
        let dir = temp();
        fs::write(dir.path().join("provenance.json"), record.to_string()).unwrap();
        if let Ok(opened) = Artifact::open(dir.path()) {
            // The files themselves are not here.
            let none = opened.provenance.files.is_empty();
            prop_assert_eq!(opened.check_files().is_ok(), none);
        }
    }
}
