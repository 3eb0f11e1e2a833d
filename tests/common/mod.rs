//! What the tests of the whole program share: running it, and checkpoints to run it on.

#![allow(dead_code)] // each test binary uses its part

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::{Value, json};
use tempfile::TempDir;

/// How the program ended and what it said.
#[derive(Debug)]
pub struct Run {
    pub code: i32,
    pub stdout: String,
    pub stderr: String,
}

impl Run {
    /// The run, which must have ended with `code`.
    #[track_caller]
    pub fn expect(self, code: i32) -> Self {
        assert_eq!(self.code, code, "stdout:\n{}\nstderr:\n{}", self.stdout, self.stderr);
        self
    }

    /// The JSON object on stdout.
    #[track_caller]
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|e| panic!("{e} in:\n{}", self.stdout))
    }

    /// The digest that a `build --json` printed.
    #[track_caller]
    pub fn digest(&self) -> String {
        self.json()["digest"].as_str().expect("a digest").to_owned()
    }
}

/// A command line for the real program, without the surrounding environment's progress bars.
pub fn command(args: Vec<OsString>) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tqc"));
    command.args(args).stdin(Stdio::null());
    command
}

/// Runs a command to its end.
pub fn finish(mut command: Command) -> Run {
    let output = command.output().expect("the program starts");
    let text = |bytes| String::from_utf8(bytes).expect("the program prints UTF-8");
    Run { code: output.status.code().unwrap_or(-1), stdout: text(output.stdout), stderr: text(output.stderr) }
}

/// Arguments of any string or path type.
#[macro_export]
macro_rules! args {
    ($($arg:expr),* $(,)?) => {{
        let list: Vec<std::ffi::OsString> = vec![$(std::ffi::OsStr::new(&$arg).to_owned()),*];
        list
    }};
}

/// Runs the program with these arguments.
#[macro_export]
macro_rules! tqc {
    ($($arg:expr),* $(,)?) => {
        $crate::common::finish($crate::common::command($crate::args![$($arg),*]))
    };
}

pub fn temp() -> TempDir {
    tempfile::tempdir().expect("the system has a temporary folder")
}

pub fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

/// Names of all fixtures, sorted.
pub fn fixtures() -> Vec<String> {
    let entries = fs::read_dir(fixture("")).unwrap();
    let mut names: Vec<String> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// Writes a recipe named `test` with this text and returns its path.
pub fn recipe(dir: &Path, text: &str) -> PathBuf {
    let path = dir.join("test.toml");
    fs::write(&path, format!("name = \"test\"\n{text}")).unwrap();
    path
}

/// A recipe whose only choice is the default codec.
pub fn default_codec(codec: &str) -> String {
    format!("[default]\ncodec = {codec}\n")
}

pub const AFFINE_4_32: &str = "{ affine = { bits = 4, group = 32 } }";

/// One tensor of a checkpoint under construction.
#[derive(Debug, Clone, PartialEq)]
pub struct Tensor {
    pub name: String,
    pub dtype: String,
    pub shape: Vec<u64>,
    pub bytes: Vec<u8>,
}

impl Tensor {
    pub fn new(name: &str, dtype: &str, shape: &[u64], bytes: Vec<u8>) -> Self {
        Self { name: name.to_owned(), dtype: dtype.to_owned(), shape: shape.to_vec(), bytes }
    }

    /// A BF16 tensor of pseudo-random values of about the size that weights have.
    pub fn random(name: &str, shape: &[u64], seed: u64) -> Self {
        let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
        let count = shape.iter().product::<u64>();
        let mut bytes = Vec::with_capacity(2 * count as usize);
        for _ in 0..count {
            // xorshift64*; the sum of four uniform bytes is near enough to a bell.
            state ^= state >> 12;
            state ^= state << 25;
            state ^= state >> 27;
            let word = state.wrapping_mul(0x2545_F491_4F6C_DD1D).to_le_bytes();
            let sum: i32 = word[4..].iter().map(|byte| i32::from(*byte)).sum();
            let value = (sum - 510) as f32 * 1e-4;
            bytes.extend_from_slice(&((value.to_bits() >> 16) as u16).to_le_bytes());
        }
        Self::new(name, "BF16", shape, bytes)
    }

    /// An F32 tensor of these values.
    pub fn of_floats(name: &str, shape: &[u64], values: &[f32]) -> Self {
        assert_eq!(values.len() as u64, shape.iter().product::<u64>(), "{name}");
        Self::new(name, "F32", shape, values.iter().flat_map(|value| value.to_le_bytes()).collect())
    }

    /// The values, widened.
    pub fn floats(&self) -> Vec<f32> {
        let halves = self.bytes.chunks_exact(2).map(|b| [b[0], b[1]]);
        match self.dtype.as_str() {
            "BF16" => bf16(&self.bytes),
            "F16" => halves.map(|b| half::f16::from_le_bytes(b).to_f32()).collect(),
            "F32" => self.bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
            other => panic!("{} is {other}", self.name),
        }
    }

    /// Makes it an F32 tensor of other values.
    pub fn map(&mut self, value: impl Fn(f32) -> f32) {
        let values: Vec<f32> = self.floats().into_iter().map(value).collect();
        *self = Self::of_floats(&self.name, &self.shape, &values);
    }

    /// Puts elements in another order: run i of `width` elements is what was run `from(i)`.
    pub fn pick(&mut self, width: usize, from: impl Fn(usize) -> usize) {
        let bytes = width * self.bytes.len() / self.shape.iter().product::<u64>() as usize;
        let runs = 0..self.bytes.len() / bytes;
        self.bytes = runs.flat_map(|i| &self.bytes[from(i) * bytes..][..bytes]).copied().collect();
    }

    /// Replaces a two-byte element.
    pub fn put_u16(&mut self, index: &[u64], bits: u16) {
        let element = index.iter().zip(&self.shape).fold(0, |flat, (i, d)| flat * d + i) as usize;
        self.bytes[2 * element..2 * element + 2].copy_from_slice(&bits.to_le_bytes());
    }
}

/// A safetensors file's header for tensors of these dtypes, shapes and sizes, laid end to end.
pub fn header<'a>(tensors: impl Iterator<Item = (&'a str, &'a str, &'a [u64], u64)>) -> Vec<u8> {
    let mut offset = 0;
    let mut entries = vec!["\"__metadata__\":{\"format\":\"pt\"}".to_owned()];
    for (name, dtype, shape, bytes) in tensors {
        let end = offset + bytes;
        entries.push(format!(
            "{}:{}",
            json!(name),
            json!({ "dtype": dtype, "shape": shape, "data_offsets": [offset, end] })
        ));
        offset = end;
    }
    raw_header(&format!("{{{}}}", entries.join(",")))
}

/// The length word and any header text.
pub fn raw_header(text: &str) -> Vec<u8> {
    let mut bytes = (text.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(text.as_bytes());
    bytes
}

pub fn write_safetensors(path: &Path, tensors: &[Tensor]) {
    let mut file = std::io::BufWriter::new(fs::File::create(path).unwrap());
    let facts =
        tensors.iter().map(|t| (t.name.as_str(), t.dtype.as_str(), t.shape.as_slice(), t.bytes.len() as u64));
    file.write_all(&header(facts)).unwrap();
    tensors.iter().for_each(|tensor| file.write_all(&tensor.bytes).unwrap());
    file.flush().unwrap();
}

/// Reads a file with the `safetensors` crate, in the order its bytes lie.
pub fn read_safetensors(path: &Path) -> Vec<Tensor> {
    let bytes = fs::read(path).unwrap();
    let read = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let mut tensors: Vec<(usize, Tensor)> = read
        .iter()
        .map(|(name, view)| {
            let shape: Vec<u64> = view.shape().iter().map(|d| *d as u64).collect();
            let dtype = view.dtype().to_string();
            let at = view.data().as_ptr() as usize;
            (at, Tensor::new(name, &dtype, &shape, view.data().to_vec()))
        })
        .collect();
    tensors.sort_by_key(|(at, _)| *at);
    tensors.into_iter().map(|(_, tensor)| tensor).collect()
}

/// Every tensor of a folder's weight files, by name.
pub fn read_folder(dir: &Path) -> BTreeMap<String, Tensor> {
    let mut tensors = BTreeMap::new();
    for file in weight_files(dir) {
        for tensor in read_safetensors(&file) {
            assert_eq!(tensors.insert(tensor.name.clone(), tensor), None, "a name twice");
        }
    }
    tensors
}

/// The `*.safetensors` files right in `dir`, sorted.
pub fn weight_files(dir: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    let mut files: Vec<PathBuf> =
        entries.filter(|path| path.extension().is_some_and(|e| e == "safetensors")).collect();
    files.sort();
    files
}

pub fn read_json(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

pub fn write_json(path: &Path, value: &Value) {
    fs::write(path, serde_json::to_vec_pretty(value).unwrap()).unwrap();
}

/// A checkpoint in memory, to be changed and written.
#[derive(Debug, Clone)]
pub struct Model {
    pub config: Value,
    pub shards: Vec<Vec<Tensor>>,
    /// Other files: name and content.
    pub files: BTreeMap<String, Vec<u8>>,
}

impl Model {
    pub fn fixture(name: &str) -> Self {
        let dir = fixture(name);
        let mut files = BTreeMap::new();
        for file in ["tokenizer.json", "tokenizer_config.json", "generation_config.json"] {
            files.insert(file.to_owned(), fs::read(dir.join(file)).unwrap());
        }
        Self {
            config: read_json(&dir.join("config.json")),
            shards: weight_files(&dir).iter().map(|file| read_safetensors(file)).collect(),
            files,
        }
    }

    /// A llama of pseudo-random weights: `layers` + 1 shards, the embeddings first.
    pub fn llama(hidden: u64, intermediate: u64, vocab: u64, layers: u64) -> Self {
        let head_dim = 32;
        let heads = hidden / head_dim;
        let config = json!({
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16",
            "hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers,
            "num_attention_heads": heads, "num_key_value_heads": heads, "head_dim": head_dim,
            "vocab_size": vocab, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
            "tie_word_embeddings": false, "eos_token_id": 2, "bos_token_id": 1,
        });
        let mut seed = 0;
        let mut random = |name: String, shape: &[u64]| {
            seed += 1;
            Tensor::random(&name, shape, seed)
        };
        let mut shards = vec![vec![
            random("model.embed_tokens.weight".to_owned(), &[vocab, hidden]),
            random("model.norm.weight".to_owned(), &[hidden]),
            random("lm_head.weight".to_owned(), &[vocab, hidden]),
        ]];
        for i in 0..layers {
            let at = format!("model.layers.{i}");
            let mut shard = Vec::new();
            for name in ["q_proj", "k_proj", "v_proj", "o_proj"] {
                shard.push(random(format!("{at}.self_attn.{name}.weight"), &[hidden, hidden]));
            }
            for (name, out, input) in [
                ("gate_proj", intermediate, hidden),
                ("up_proj", intermediate, hidden),
                ("down_proj", hidden, intermediate),
            ] {
                shard.push(random(format!("{at}.mlp.{name}.weight"), &[out, input]));
            }
            for name in ["input_layernorm", "post_attention_layernorm"] {
                shard.push(random(format!("{at}.{name}.weight"), &[hidden]));
            }
            shards.push(shard);
        }
        let tokenizer = b"{\"version\":\"1.0\",\"model\":{\"type\":\"BPE\",\"vocab\":{},\"merges\":[]}}";
        let files = [("tokenizer.json".to_owned(), tokenizer.to_vec())].into();
        Self { config, shards, files }
    }

    pub fn shard_name(&self, index: usize) -> String {
        match self.shards.len() {
            1 => "model.safetensors".to_owned(),
            count => format!("model-{:05}-of-{count:05}.safetensors", index + 1),
        }
    }

    /// Writes everything; several shards get an index.
    pub fn write(&self, dir: &Path) {
        fs::create_dir_all(dir).unwrap();
        write_json(&dir.join("config.json"), &self.config);
        let mut map = BTreeMap::new();
        for (index, shard) in self.shards.iter().enumerate() {
            let name = self.shard_name(index);
            write_safetensors(&dir.join(&name), shard);
            for tensor in shard {
                map.entry(tensor.name.clone()).or_insert_with(|| name.clone());
            }
        }
        if self.shards.len() > 1 {
            let index = json!({ "metadata": {}, "weight_map": map });
            write_json(&dir.join("model.safetensors.index.json"), &index);
        }
        for (name, bytes) in &self.files {
            fs::write(dir.join(name), bytes).unwrap();
        }
    }

    /// The tensor of this name.
    pub fn tensor(&mut self, name: &str) -> &mut Tensor {
        self.shards.iter_mut().flatten().find(|tensor| tensor.name == name).expect(name)
    }

    /// Every tensor whose name ends so.
    pub fn ending(&mut self, suffix: &str) -> impl Iterator<Item = &mut Tensor> {
        self.shards.iter_mut().flatten().filter(move |tensor| tensor.name.ends_with(suffix))
    }

    /// Takes the tensor out.
    pub fn remove(&mut self, name: &str) -> Tensor {
        for shard in &mut self.shards {
            if let Some(at) = shard.iter().position(|tensor| tensor.name == name) {
                return shard.remove(at);
            }
        }
        panic!("no tensor `{name}`");
    }

    /// Adds a tensor to the last shard.
    pub fn add(&mut self, tensor: Tensor) {
        self.shards.last_mut().unwrap().push(tensor);
    }
}

/// Copies a folder of files, subfolders included.
pub fn copy_folder(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        let target = to.join(path.file_name().unwrap());
        if path.is_dir() {
            copy_folder(&path, &target);
        } else {
            fs::copy(&path, &target).unwrap();
        }
    }
}

/// Changes one byte of a file.
pub fn flip_byte(path: &Path, at: usize) {
    let mut bytes = fs::read(path).unwrap();
    bytes[at] ^= 0x10;
    fs::write(path, bytes).unwrap();
}

pub fn bf16(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(2).map(|b| f32::from_bits(u32::from(u16::from_le_bytes([b[0], b[1]])) << 16)).collect()
}
