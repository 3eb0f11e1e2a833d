//! Makes a dump: one streamed pass of the teacher.

use std::collections::BTreeMap;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use serde::{Deserialize, Serialize};
use serde_json::json;

use super::topk::Top;
use super::{
    FileRecord, Format, MACHINE, NoiseFloor, RECORD, Record, SequenceRecord, Teacher, VERSION, head_digest,
};
use crate::artifact::layout::{StoredTensor, header};
use crate::artifact::open::file_digest;
use crate::backend::cpu::Cpu;
use crate::digest::{Digest, Hasher, canonical_json};
use crate::eval::forward::{Forward, Need};
use crate::eval::identity::Identity;
use crate::eval::work::{DONE, RESIDUAL, Work};
use crate::eval::{EvalError, Progress};
use crate::failure::Outcome;
use crate::numeric::divergence::{divergence, log_sum};
use crate::numeric::math::exp64;
use crate::numeric::{narrow, widen};
use crate::process::PeakMemory;
use crate::runtime::{Head, Weights};
use crate::tensor::{Dtype, Float, Layout};
use crate::text::documents::{Documents, Sequence, tokens_digest};
use crate::tool::Tool;
use crate::units::Bytes;

/// Tokens that the `topk` format keeps of a position.
pub const TOP: usize = 2048;

/// Folder that the dump grows in, inside that of unfinished work.
const STAGE: &str = "dump";

/// Bytes read at a time.
const PART: usize = 1 << 20;

/// How a dump is made.
pub struct Making<'a> {
    /// Folder of the dump.
    pub target: &'a Path,
    /// What is kept of a position: hidden states or the likeliest tokens.
    pub format: Format,
    /// Type of the numbers that are kept: F16 or F32.
    pub float: Float,
    /// Most bytes to hold, mapped weights left out.
    pub budget: Bytes,
    /// Throw away unfinished work of another task.
    pub discard: bool,
    /// Raised to stop; finished work stays.
    pub stop: &'a AtomicBool,
    /// Who is told.
    pub progress: &'a dyn Progress,
}

/// A dump that was made.
#[derive(Debug, Clone, Serialize)]
pub struct Made {
    /// Its folder.
    pub path: std::path::PathBuf,
    /// SHA-256 of its record.
    pub digest: Digest,
    /// Documents.
    pub documents: usize,
    /// Documents left out because they were short, and cut at the context.
    pub short: usize,
    /// See [`Made::short`].
    pub cut: usize,
    /// Positions kept.
    pub tokens: usize,
    /// Bytes of a position in the file.
    pub bytes_per_position: u64,
    /// See [`Record::noise_floor`].
    pub noise_floor: NoiseFloor,
    /// The teacher's perplexity.
    pub teacher_ppl: Option<f64>,
    /// Sequences that an earlier, unfinished run had finished.
    pub resumed_sequences: usize,
    /// What the pass was planned to hold.
    pub need: Need,
    /// What the process held at most.
    pub peak: PeakMemory,
    /// Wall time, seconds.
    pub elapsed_s: f64,
}

/// What decides a dump's bytes.
#[derive(Serialize)]
struct Key<'a> {
    teacher: Digest,
    text: Digest,
    tokens: Digest,
    format: Format,
    float: String,
    tool: &'a Tool,
}

/// Sequences that are done, and the sums over them.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
struct Done {
    sequences: usize,
    positions: usize,
    kl: f64,
    kl_most: f64,
    nll: f64,
    targets: usize,
    /// Rows of each finished batch, and the digest of what is written for them.
    written: Vec<(Range<usize>, Digest)>,
}

/// A file that grows row by row.
struct Plane {
    file: File,
    /// Where each tensor's payload begins.
    starts: Vec<u64>,
    /// Bytes of a row in each.
    rows: Vec<u64>,
}

impl Plane {
    fn open(path: &Path, tensors: Vec<StoredTensor>, positions: u64) -> Result<Self, EvalError> {
        let head = header(&tensors.iter().collect::<Vec<_>>(), Layout::Mlx);
        let mut at = head.len() as u64;
        let mut starts = Vec::new();
        for tensor in &tensors {
            starts.push(at);
            at += tensor.bytes;
        }
        let open = || {
            let file = File::options().create(true).truncate(false).read(true).write(true).open(path)?;
            file.write_all_at(&head, 0)?;
            file.set_len(at)?;
            Ok(file)
        };
        let file = open().map_err(EvalError::io("write", path))?;
        let rows = tensors.iter().map(|tensor| tensor.bytes / positions).collect();
        Ok(Self { file, starts, rows })
    }

    /// The digest of rows `rows` of every tensor.
    fn digest(&self, path: &Path, rows: &Range<usize>) -> Result<Digest, EvalError> {
        let mut hasher = Hasher::default();
        for (start, row) in self.starts.iter().zip(&self.rows) {
            let (mut at, end) = (start + rows.start as u64 * row, start + rows.end as u64 * row);
            let mut bytes = vec![0; PART.min((end - at) as usize)];
            while at < end {
                let len = PART.min((end - at) as usize);
                self.file.read_exact_at(&mut bytes[..len], at).map_err(EvalError::io("read", path))?;
                hasher.update(&bytes[..len]);
                at += len as u64;
            }
        }
        Ok(hasher.finish())
    }

    fn write(&self, path: &Path, plane: usize, row: usize, bytes: &[u8]) -> Result<(), EvalError> {
        let at = self.starts[plane] + row as u64 * self.rows[plane];
        self.file.write_all_at(bytes, at).map_err(EvalError::io("write", path))
    }
}

/// What is kept of a position, and what keeping it costs.
#[derive(Default, Clone)]
struct Kept {
    top: Option<(Top, f64)>,
    kl: f64,
    nll: Option<f64>,
    finite: bool,
}

/// Makes the dump of `documents` by the model `weights`, whose identity is `teacher`.
///
/// # Errors
/// [`EvalError::Occupied`], [`EvalError::OtherWork`], [`EvalError::Budget`], [`EvalError::HiddenOverflow`],
/// [`EvalError::TeacherNonFinite`], [`EvalError::Interrupted`], and those of the runtime and of writing.
pub fn make(
    weights: &Weights,
    cpu: &Arc<Cpu>,
    teacher: &Identity,
    documents: &Documents,
    making: &Making<'_>,
) -> Outcome<Made> {
    if making.target.symlink_metadata().is_ok() {
        return Err(EvalError::Occupied { path: making.target.to_owned() }.into());
    }
    let tool = Tool::this();
    let key = Key {
        teacher: teacher.digest,
        text: documents.record.sha256,
        tokens: tokens_digest(&documents.sequences),
        format: making.format,
        float: making.float.to_string(),
        tool: &tool,
    };
    let work = Work::take(making.target, &key, making.discard)?;
    match fill(weights, cpu, teacher, documents, making, &key, &work) {
        Ok(made) => {
            work.remove()?;
            Ok(made)
        }
        Err(error) => Err(work.failed(error)),
    }
}

/// Makes the dump in `work`, and moves it to its place.
fn fill(
    weights: &Weights,
    cpu: &Arc<Cpu>,
    teacher: &Identity,
    documents: &Documents,
    making: &Making<'_>,
    key: &Key<'_>,
    work: &Work,
) -> Outcome<Made> {
    let start = Instant::now();
    let sequences: Vec<Vec<u32>> = documents.sequences.iter().map(|s| s.tokens.clone()).collect();
    let positions: usize = sequences.iter().map(Vec::len).sum();
    let forward = Forward {
        weights,
        cpu,
        sequences: &sequences,
        budget: making.budget,
        work: Some(work),
        stop: making.stop,
        progress: making.progress,
    };
    let need = forward.need()?;
    making.progress.need(&need);

    let head = Head::open(weights, cpu)?;
    let (hidden, vocab) = (weights.decoder.hidden, weights.decoder.vocab);
    let (name, tensors) = planes(making, positions, hidden, vocab);
    let stage = work.path(STAGE);
    std::fs::create_dir_all(&stage).map_err(EvalError::io("create", &stage))?;
    let path = stage.join(name);
    let plane = Plane::open(&path, tensors, positions as u64)?;
    let mut done: Done = work.read(DONE).unwrap_or_default();
    for (rows, digest) in &done.written {
        if plane.digest(&path, rows)? != *digest {
            // Somebody changed what was written: nothing of it is believed.
            done = Done::default();
            break;
        }
    }
    let resumed_sequences = done.sequences;
    let mut peak = PeakMemory::default();
    let mut maker = Maker { head: &head, cpu, making, plane: &plane, path: &path, hidden, vocab };
    forward.run(done.sequences, &mut |batch, residual| {
        let part = &documents.sequences[batch.clone()];
        maker.rows(part, residual, forward.rows_of_logits(), &mut done)?;
        plane.file.sync_data().map_err(EvalError::io("write", &path))?;
        let rows = done.written.last().map_or(0, |(rows, _)| rows.end)..done.positions;
        done.written.push((rows.clone(), plane.digest(&path, &rows)?));
        done.sequences = batch.end;
        peak.sample();
        // Rows that a crash leaves beyond these sums are written again.
        work.write(DONE, &canonical_json(&done))?;
        work.forget(&format!("{RESIDUAL}.f32"));
        Ok(())
    })?;

    let record = Record {
        version: VERSION,
        format: making.format,
        dtype: making.float.dtype().to_string(),
        teacher: Teacher {
            digest: Some(teacher.digest),
            model_type: teacher.model_type.clone(),
            vocab,
            hidden,
            tokenizer_sha256: teacher.tokenizer,
            head_sha256: (making.format == Format::Hidden)
                .then(|| weights.head().map(|m| head_digest(&m)))
                .transpose()?,
        },
        text: Some(documents.record.clone()),
        tokens_sha256: key.tokens,
        sequences: documents
            .sequences
            .iter()
            .map(|s| SequenceRecord { document: s.document, line: s.line, tokens: s.tokens.len() })
            .collect(),
        noise_floor: NoiseFloor { mean_kl: done.kl / positions as f64, max_kl: done.kl_most },
        teacher_ppl: (done.targets > 0).then(|| exp64(done.nll / done.targets as f64)),
        files: BTreeMap::new(),
        tool: format!("{} {} ({})", key.tool.name, key.tool.version, key.tool.source_sha256),
    };
    let digest = publish(making, work, name, record, &sequences, &weights.dir)?;
    Ok(Made {
        path: making.target.to_owned(),
        digest,
        documents: documents.record.documents,
        short: documents.record.short,
        cut: documents.record.cut,
        tokens: positions,
        bytes_per_position: plane.rows.iter().sum(),
        noise_floor: NoiseFloor { mean_kl: done.kl / positions as f64, max_kl: done.kl_most },
        teacher_ppl: (done.targets > 0).then(|| exp64(done.nll / done.targets as f64)),
        resumed_sequences,
        need,
        peak,
        elapsed_s: start.elapsed().as_secs_f64(),
    })
}

fn planes(
    making: &Making<'_>,
    positions: usize,
    hidden: usize,
    vocab: usize,
) -> (&'static str, Vec<StoredTensor>) {
    let tensor = |name: &str, dtype: Dtype, dims: &[usize]| StoredTensor {
        name: name.to_owned(),
        dtype,
        shape: crate::tensor::Shape(dims.iter().map(|d| *d as u64).collect()),
        bytes: dims.iter().product::<usize>() as u64 * dtype.bytes(),
    };
    let float = making.float.dtype();
    match making.format {
        Format::TopK => {
            let k = TOP.min(vocab);
            let planes = vec![
                tensor("ids", Dtype::U32, &[positions, k]),
                tensor("log_probs", float, &[positions, k]),
                tensor("log_sum", Dtype::F32, &[positions]),
                tensor("rest", Dtype::F32, &[positions]),
            ];
            ("topk.safetensors", planes)
        }
        _ => ("hidden.safetensors", vec![tensor("hidden", float, &[positions, hidden])]),
    }
}

struct Maker<'a> {
    head: &'a Head,
    cpu: &'a Arc<Cpu>,
    making: &'a Making<'a>,
    plane: &'a Plane,
    path: &'a Path,
    hidden: usize,
    vocab: usize,
}

impl Maker<'_> {
    /// Keeps the rows of some sequences, whose residual streams are `residual`.
    fn rows(
        &mut self,
        sequences: &[Sequence],
        residual: &[f32],
        together: usize,
        done: &mut Done,
    ) -> Result<(), EvalError> {
        let targets: Vec<Option<u32>> =
            sequences.iter().flat_map(|s| s.tokens[1..].iter().map(|id| Some(*id)).chain([None])).collect();
        for (rows, targets) in residual.chunks(together * self.hidden).zip(targets.chunks(together)) {
            let states = self.head.norm(rows);
            let logits = self.head.logits(&states);
            let kept = match self.making.format {
                Format::TopK => self.keep_top(done.positions, &logits, targets)?,
                _ => self.keep_hidden(done.positions, &states, &logits, targets)?,
            };
            for (i, kept) in kept.iter().enumerate() {
                if !kept.finite {
                    return Err(EvalError::TeacherNonFinite { position: done.positions + i });
                }
                done.kl += kept.kl;
                done.kl_most = done.kl_most.max(kept.kl);
                if let Some(nll) = kept.nll {
                    done.nll += nll;
                    done.targets += 1;
                }
            }
            done.positions += targets.len();
        }
        Ok(())
    }

    fn keep_hidden(
        &self,
        first: usize,
        states: &[f32],
        logits: &[f32],
        targets: &[Option<u32>],
    ) -> Result<Vec<Kept>, EvalError> {
        let float = self.making.float;
        let mut bytes = vec![0; states.len() * float.bytes()];
        if !narrow(float, states, &mut bytes, self.cpu.isa) {
            let mut back = vec![0.0; states.len()];
            widen(float, &bytes, &mut back, self.cpu.isa);
            let at = back.iter().position(|value| !value.is_finite()).expect("one value did not fit");
            if !states[at].is_finite() {
                return Err(EvalError::TeacherNonFinite { position: first + at / self.hidden });
            }
            return Err(EvalError::HiddenOverflow {
                position: first + at / self.hidden,
                value: states[at],
                dtype: float.torch_name(),
            });
        }
        self.plane.write(self.path, 0, first, &bytes)?;
        // What the dump will give back, to know what it cannot see.
        let again = match float {
            Float::F32 => None,
            _ => {
                let mut back = vec![0.0; states.len()];
                widen(float, &bytes, &mut back, self.cpu.isa);
                Some(self.head.logits(&back))
            }
        };
        let (vocab, isa) = (self.vocab, self.cpu.isa);
        let mut kept = vec![Kept::default(); targets.len()];
        self.cpu.threads.chunks(&mut kept, 1, &|i, kept| {
            let row = &logits[i * vocab..(i + 1) * vocab];
            let Some((sum, _)) = log_sum(row, isa) else { return };
            let again = again.as_ref().map(|again| &again[i * vocab..(i + 1) * vocab]);
            let kl = again.map_or(Some(0.0), |again| Some(divergence(row, again, isa)?.kl));
            let nll = targets[i].map(|id| sum - f64::from(row[id as usize]));
            kept[0] = Kept { top: None, kl: kl.unwrap_or(0.0), nll, finite: kl.is_some() };
        });
        Ok(kept)
    }

    fn keep_top(
        &self,
        first: usize,
        logits: &[f32],
        targets: &[Option<u32>],
    ) -> Result<Vec<Kept>, EvalError> {
        let (vocab, isa, float) = (self.vocab, self.cpu.isa, self.making.float);
        let mut kept = vec![Kept::default(); targets.len()];
        self.cpu.threads.chunks(&mut kept, 1, &|i, kept| {
            let row = &logits[i * vocab..(i + 1) * vocab];
            let Some((mut top, sum)) = Top::of(row, TOP.min(vocab), isa) else { return };
            let mut bytes = vec![0; top.log_probs.len() * float.bytes()];
            narrow(float, &top.log_probs, &mut bytes, isa);
            widen(float, &bytes, &mut top.log_probs, isa);
            let kl = crate::eval::kl::of_top(&top, row, isa).map(|side| side.kl);
            let nll = targets[i].map(|id| sum - f64::from(row[id as usize]));
            kept[0] = Kept { kl: kl.unwrap_or(0.0), nll, finite: kl.is_some(), top: Some((top, sum)) };
        });
        for (i, kept) in kept.iter().enumerate() {
            let Some((top, sum)) = &kept.top else { continue };
            let mut log_probs = vec![0; top.log_probs.len() * float.bytes()];
            narrow(float, &top.log_probs, &mut log_probs, isa);
            let ids: Vec<u8> = top.ids.iter().flat_map(|id| id.to_le_bytes()).collect();
            let rest = top.rest.unwrap_or(0.0);
            let planes = [ids, log_probs, (*sum as f32).to_le_bytes().to_vec(), rest.to_le_bytes().to_vec()];
            for (plane, bytes) in planes.iter().enumerate() {
                self.plane.write(self.path, plane, first + i, bytes)?;
            }
        }
        Ok(kept)
    }
}

/// Writes the small files, and makes the folder appear whole.
fn publish(
    making: &Making<'_>,
    work: &Work,
    name: &str,
    mut record: Record,
    sequences: &[Vec<u32>],
    teacher: &Path,
) -> Result<Digest, EvalError> {
    let stage = work.path(STAGE);
    let ids: Vec<u8> = sequences.iter().flatten().flat_map(|id| id.to_le_bytes()).collect();
    let tensor = StoredTensor {
        name: "tokens".to_owned(),
        dtype: Dtype::U32,
        shape: crate::tensor::Shape(vec![ids.len() as u64 / 4]),
        bytes: ids.len() as u64,
    };
    let tokens = [header(&[&tensor], Layout::Mlx), ids].concat();
    let write = |name: &str, bytes: &[u8]| work.write(&format!("{STAGE}/{name}"), bytes);
    write("tokens.safetensors", &tokens)?;
    for name in ["tokens.safetensors", name] {
        let path = stage.join(name);
        let bytes = path.metadata().map_err(EvalError::io("read", &path))?.len();
        let sha256 = file_digest(&path).map_err(EvalError::io("read", &path))?;
        record.files.insert(name.to_owned(), FileRecord { bytes, sha256 });
    }
    let bytes = canonical_json(&record);
    write(RECORD, &bytes)?;
    let teacher = std::path::absolute(teacher).unwrap_or_else(|_| teacher.to_owned());
    let machine = json!({ "teacher": teacher, "machine": crate::eval::machine() });
    write(MACHINE, &canonical_json(&machine))?;
    std::fs::rename(&stage, making.target).map_err(EvalError::io("rename", &stage))?;
    Ok(Digest::of(&bytes))
}
