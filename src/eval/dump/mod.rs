//! What a teacher said about a text, kept so that any number of candidates can be held against it.
//!
//! ```text
//! dump/   dump.json            the record: teacher, text, sequences, digests of the other files; its own SHA-256
//!                              is the dump's digest
//!         tokens.safetensors   `tokens` U32 [T]: all sequences, end to end
//!         hidden.safetensors   `hidden` F16 or F32 [T, H]: final-normed hidden states, what the head reads; or
//!         topk.safetensors     the K likeliest of each position: `ids` U32 [T, K], `log_probs` F16 or F32 [T, K],
//!                              `log_sum` F32 [T] of all logits, `rest` F32 [T], the probability of all others
//!         machine.json         where it was made; no digest covers it
//! ```
//!
//! With hidden states the teacher's logits are exact over the whole vocabulary but for the rounding to F16, whose
//! effect is measured and recorded as the noise floor; the head is named by its digest and read from the teacher's
//! folder. llama.cpp's `_logits_` files are read as dumps too: see [`llama`].

pub mod llama;
pub mod make;
pub mod topk;

use std::collections::BTreeMap;
use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::EvalError;
use crate::artifact::open::file_digest;
use crate::backend::Packed;
use crate::backend::cpu::Cpu;
use crate::checkpoint::Checkpoint;
use crate::digest::{Digest, Hasher, canonical_json};
use crate::failure::Outcome;
use crate::isa::Isa;
use crate::numeric::widen;
use crate::runtime::{Head, Weights};
use crate::tensor::Float;
use crate::text::documents::{Sequence, TextRecord, tokens_digest};

/// Version of the record's shape.
pub const VERSION: u32 = 1;
/// Name of the record.
pub const RECORD: &str = "dump.json";
/// Name of the file that says where the dump was made.
pub const MACHINE: &str = "machine.json";

/// What is kept of a position.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Format {
    /// The final hidden state.
    Hidden,
    /// The largest logits, and the logarithm of the sum over all.
    TopK,
    /// All log-probabilities in 16 bits, as llama.cpp writes them.
    Llama,
}

/// The record of a dump.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Record {
    /// [`VERSION`].
    pub version: u32,
    /// What is kept of a position.
    pub format: Format,
    /// `F16`, `F32` or, of llama.cpp, `U16`.
    pub dtype: String,
    /// Who spoke.
    pub teacher: Teacher,
    /// About what; none of llama.cpp's files.
    pub text: Option<TextRecord>,
    /// Digest of the token stream and its boundaries.
    pub tokens_sha256: Digest,
    /// Sequences, in order.
    pub sequences: Vec<SequenceRecord>,
    /// Mean and largest KL(teacher || teacher as the dump gives it), nats: no KL below this means anything.
    pub noise_floor: NoiseFloor,
    /// The teacher's perplexity.
    pub teacher_ppl: Option<f64>,
    /// Other files: size and digest.
    pub files: BTreeMap<String, FileRecord>,
    /// The program that made it.
    pub tool: String,
}

/// The teacher, as a dump records it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Teacher {
    /// Digest of the model; none of llama.cpp's files, which do not say.
    pub digest: Option<Digest>,
    /// `model_type` of its config.
    pub model_type: Option<String>,
    /// Tokens of its vocabulary, rows of its head.
    pub vocab: usize,
    /// Width of its hidden states; 0 if none are kept.
    pub hidden: usize,
    /// What its tokenizer does; none of llama.cpp's files.
    pub tokenizer_sha256: Option<Digest>,
    /// Digest of its head: [`head_digest`].
    pub head_sha256: Option<Digest>,
}

/// A sequence in the token stream.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SequenceRecord {
    /// Number of its document.
    pub document: usize,
    /// Line of the document in the text's file; 0 of llama.cpp's files.
    pub line: usize,
    /// Its tokens.
    pub tokens: usize,
}

/// What a dump cannot see, nats.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(missing_docs)]
pub struct NoiseFloor {
    pub mean_kl: f64,
    pub max_kl: f64,
}

/// A file of the dump.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(missing_docs)]
pub struct FileRecord {
    pub bytes: u64,
    pub sha256: Digest,
}

/// What a teacher says about some rows.
pub enum Said {
    /// Logits [rows, V].
    Logits(Vec<f32>),
    /// The likeliest tokens of each row.
    Top(Vec<topk::Top>),
}

/// An open dump.
#[derive(Debug)]
pub struct Dump {
    /// Its record.
    pub record: Record,
    /// The record's digest; of llama.cpp's files, the file's.
    pub digest: Digest,
    /// Its sequences.
    pub sequences: Vec<Sequence>,
    /// Positions of each sequence that the teacher spoke about.
    pub scored: Vec<Range<usize>>,
    content: Content,
    path: PathBuf,
}

#[derive(Debug)]
enum Content {
    /// Plane `hidden`, or those of [`topk`].
    Planes(Checkpoint),
    Llama(llama::Logits),
}

/// The teacher's side of a comparison: an open dump, and the head if it needs one.
#[derive(Debug)]
pub struct Speaker<'a> {
    /// The dump.
    pub dump: &'a Dump,
    head: Option<Head>,
    isa: Isa,
}

impl Dump {
    /// Opens the dump at `path`: a folder of ours, or a `_logits_` file. Every file is compared with its digest.
    ///
    /// # Errors
    /// [`EvalError::NotADump`], [`EvalError::DumpVersion`], [`EvalError::Truncated`], [`EvalError::Damaged`], and
    /// those of reading.
    pub fn open(path: &Path) -> Outcome<Self> {
        if path.is_file() {
            return llama::open(path);
        }
        let file = path.join(RECORD);
        let bytes = std::fs::read(&file).map_err(EvalError::io("read", &file))?;
        let bad = |problem: String| EvalError::NotADump { path: path.to_owned(), problem };
        let value: serde_json::Value =
            serde_json::from_slice(&bytes).map_err(|error| bad(format!("`{RECORD}`: {error}")))?;
        match value.get("version").and_then(serde_json::Value::as_u64) {
            Some(version) if version == u64::from(VERSION) => {}
            Some(found) => return Err(EvalError::DumpVersion { path: file, found, needed: VERSION }.into()),
            None => return Err(bad(format!("`{RECORD}` has no `version`")).into()),
        }
        let record: Record =
            serde_json::from_value(value).map_err(|error| bad(format!("`{RECORD}`: {error}")))?;
        let planes = match record.format {
            Format::Hidden => "hidden.safetensors",
            Format::TopK => "topk.safetensors",
            Format::Llama => return Err(bad("llama.cpp's format has no folder".to_owned()).into()),
        };
        for name in ["tokens.safetensors", planes] {
            let needed =
                record.files.get(name).ok_or_else(|| bad(format!("`{RECORD}` does not name `{name}`")))?;
            check_file(&path.join(name), needed)?;
        }
        let tokens = Checkpoint::open(&path.join("tokens.safetensors"))?;
        let content = Checkpoint::open(&path.join(planes))?;
        let stream = tokens.get("tokens").map(|entry| tokens.bytes(entry));
        let stream = stream.ok_or_else(|| bad("`tokens.safetensors` has no `tokens`".to_owned()))?;
        let mut ids = stream.as_chunks().0.iter().map(|b| u32::from_le_bytes(*b));
        let mut sequences = Vec::new();
        for sequence in &record.sequences {
            let tokens: Vec<u32> = ids.by_ref().take(sequence.tokens).collect();
            if tokens.len() != sequence.tokens || tokens.is_empty() {
                return Err(bad("its sequences have more tokens than its stream".to_owned()).into());
            }
            sequences.push(Sequence { document: sequence.document, line: sequence.line, tokens });
        }
        if ids.next().is_some() || sequences.is_empty() || tokens_digest(&sequences) != record.tokens_sha256 {
            return Err(bad("its token stream is not the one it records".to_owned()).into());
        }
        let positions = stream.len() as u64 / 4;
        let rows = |name: &str| content.get(name).and_then(|entry| entry.shape.0.first().copied());
        let wanted: &[&str] = match record.format {
            Format::Hidden => &["hidden"],
            _ => &topk::PLANES,
        };
        if let Some(name) = wanted.iter().find(|name| rows(name) != Some(positions)) {
            return Err(bad(format!("`{name}` does not have a row for each of {positions} tokens")).into());
        }
        let scored = sequences.iter().map(|s| 0..s.tokens.len()).collect();
        let digest = Digest::of(&bytes);
        Ok(Self {
            record,
            digest,
            sequences,
            scored,
            content: Content::Planes(content),
            path: path.to_owned(),
        })
    }

    /// Finds the head that the teacher's logits are made with, if the dump needs one: in `dir`, else in the folder
    /// that the dump was made from.
    ///
    /// # Errors
    /// [`EvalError::NoHead`].
    pub fn speaker(&self, dir: Option<&Path>, cpu: &Arc<Cpu>) -> Outcome<Speaker<'_>> {
        let speaker = |head| Ok(Speaker { dump: self, head, isa: cpu.isa });
        let Some(needed) = self.record.teacher.head_sha256.filter(|_| self.record.format == Format::Hidden)
        else {
            return speaker(None);
        };
        let dir = self.teacher_dir(dir)?;
        let weights = Weights::open(&dir)?;
        let matrix = weights.head()?;
        let found = head_digest(&matrix);
        let teacher = &self.record.teacher;
        let fits = matrix.in_features == teacher.hidden && matrix.out_features == teacher.vocab;
        if found != needed || !fits {
            let tried = format!("that of `{}` has {found}", dir.display());
            return Err(EvalError::NoHead { needed, tried }.into());
        }
        speaker(Some(Head::of_matrix(&matrix, cpu)))
    }

    /// The teacher's folder: `dir`, else the one that the dump was made from.
    ///
    /// # Errors
    /// [`EvalError::NoTeacher`].
    pub fn teacher_dir(&self, dir: Option<&Path>) -> Result<PathBuf, EvalError> {
        let recorded = || {
            let machine = std::fs::read(self.path.join(MACHINE)).ok()?;
            let machine: serde_json::Value = serde_json::from_slice(&machine).ok()?;
            Some(PathBuf::from(machine.get("teacher")?.as_str()?))
        };
        match dir.map(Path::to_owned).or_else(recorded) {
            Some(dir) if dir.is_dir() => Ok(dir),
            Some(dir) => {
                Err(EvalError::NoTeacher { tried: format!("there is no folder `{}`", dir.display()) })
            }
            None => Err(EvalError::NoTeacher { tried: "the dump does not say where it is".to_owned() }),
        }
    }
}

impl Speaker<'_> {
    /// What the teacher says after each of the positions `rows` of the token stream.
    ///
    /// # Panics
    /// If a row is not one that the teacher spoke about.
    pub fn say(&self, rows: Range<usize>) -> Said {
        match &self.dump.content {
            Content::Llama(logits) => Said::Top(rows.map(|row| logits.row(row)).collect()),
            Content::Planes(planes) => match &self.head {
                Some(head) => Said::Logits(head.logits(&self.floats(planes, "hidden", &rows))),
                None => {
                    let ids = self.part(planes, "ids", &rows).as_chunks().0;
                    let ids: Vec<u32> = ids.iter().map(|b| u32::from_le_bytes(*b)).collect();
                    let log_probs = self.floats(planes, "log_probs", &rows);
                    let rests = self.floats(planes, "rest", &rows);
                    let k = ids.len() / rows.len();
                    let parts = ids.chunks(k).zip(log_probs.chunks(k)).zip(rests);
                    let top = |((ids, log_probs), rest): ((&[u32], &[f32]), f32)| topk::Top {
                        ids: ids.to_vec(),
                        log_probs: log_probs.to_vec(),
                        rest: Some(rest),
                    };
                    Said::Top(parts.map(top).collect())
                }
            },
        }
    }

    fn part<'a>(&self, planes: &'a Checkpoint, name: &str, rows: &Range<usize>) -> &'a [u8] {
        let entry = planes.get(name).expect("the dump was checked when it was opened");
        let bytes = planes.bytes(entry);
        let row = bytes.len() / entry.shape.0[0] as usize;
        &bytes[rows.start * row..rows.end * row]
    }

    fn floats(&self, planes: &Checkpoint, name: &str, rows: &Range<usize>) -> Vec<f32> {
        let bytes = self.part(planes, name, rows);
        let entry = planes.get(name).expect("the dump was checked when it was opened");
        let float = entry.dtype.float().unwrap_or(Float::F32);
        let mut values = vec![0.0; bytes.len() / float.bytes()];
        // Values that are not finite show as positions without a divergence.
        widen(float, bytes, &mut values, self.isa);
        values
    }
}

fn check_file(path: &Path, needed: &FileRecord) -> Result<(), EvalError> {
    let found = File::open(path).and_then(|file| file.metadata()).map_err(EvalError::io("open", path))?.len();
    if found != needed.bytes {
        return Err(EvalError::Truncated { path: path.to_owned(), found, needed: needed.bytes });
    }
    let found = file_digest(path).map_err(EvalError::io("read", path))?;
    match found == needed.sha256 {
        true => Ok(()),
        false => Err(EvalError::Damaged { path: path.to_owned(), found, needed: needed.sha256 }),
    }
}

/// The digest of a head: its shape, how it is stored, and all its bytes.
pub fn head_digest(matrix: &Packed) -> Digest {
    let mut hasher = Hasher::default();
    let shape = (matrix.out_features, matrix.in_features);
    hasher.update(&canonical_json(&(matrix.codec, matrix.float.to_string(), shape)));
    matrix.planes.iter().for_each(|plane| hasher.update(plane.bytes()));
    hasher.finish()
}
