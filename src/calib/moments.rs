//! Second moments in files: a table of contents, and the matrices in safetensors beside it.
//!
//! `docs/formats/hessians.md` is the layout for others to write and read.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::Write as _;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::inputs::{Input, InputKey, Inputs};
use super::{CalibError, io};
use crate::artifact::layout::{StoredTensor, header};
use crate::artifact::open::file_digest;
use crate::artifact::provenance::CalibrationText;
use crate::checkpoint::{Checkpoint, is_plain};
use crate::digest::{Digest, canonical_json};
use crate::failure::Outcome;
use crate::linalg::Symmetric;
use crate::plan::Plan;
use crate::tensor::{Dtype, Layout, Shape};

/// The table of contents' name.
pub const CONTENTS: &str = "hessians.json";

/// What its `format` says.
const FORMAT: &str = "tqc-hessians/1";

/// How far two mirrored values may be apart, over the larger diagonal entry of the two.
const ASYMMETRY: f32 = 1e-3;

/// The table of contents.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Contents {
    /// `tqc-hessians/1`.
    pub format: String,
    /// `model_type` of the model.
    pub model_type: String,
    /// [`Checkpoint::shapes_digest`] of the model.
    pub tensors_sha256: Digest,
    /// [`Plan::basis`] that inputs are in.
    pub basis: String,
    /// The rows; null if another program took them.
    pub text: Option<CalibrationText>,
    /// One row a sum.
    pub inputs: Vec<InputRow>,
    /// One row for each module, or expert, whose outputs' errors have costs. `tqc calibrate` writes none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub outputs: Vec<OutputRow>,
    /// Files beside this one, with their SHA-256.
    pub files: BTreeMap<String, Digest>,
}

/// One sum.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct InputRow {
    /// What its tensors' names begin with.
    pub name: String,
    /// Modules that read these inputs, as rules name them.
    pub modules: Vec<String>,
    /// Number of the expert; null for other modules.
    pub expert: Option<usize>,
    /// Tokens that were summed over.
    pub tokens: u64,
    /// The file that holds `NAME.hessian` and `NAME.magnitude`.
    pub file: String,
}

/// What errors in the outputs of one matrix cost together.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OutputRow {
    /// What its tensor's name begins with.
    pub name: String,
    /// The module, as rules name it.
    pub module: String,
    /// Number of the expert; null for other modules.
    pub expert: Option<usize>,
    /// The file that holds `NAME.output_hessian`.
    pub file: String,
}

/// Writes sums of one layer into `out`/`file`; gives back their rows.
///
/// # Errors
/// Those of the file system.
pub(super) fn write(out: &Path, file: &str, inputs: &Inputs) -> Result<(Vec<InputRow>, Digest), CalibError> {
    let path = out.join(file);
    let mut rows = Vec::new();
    let mut tensors = Vec::new();
    for (key, input, readers) in inputs.iter() {
        let channels = input.magnitude.len() as u64;
        let name = match key.expert {
            Some(expert) => format!("{}.{expert}", key.module),
            None => key.module.clone(),
        };
        for (suffix, shape) in
            [("hessian", Shape::from([channels, channels])), ("magnitude", Shape::from([channels]))]
        {
            let bytes = 4 * shape.elements().expect("a matrix that was summed");
            tensors.push(StoredTensor { name: format!("{name}.{suffix}"), dtype: Dtype::F32, shape, bytes });
        }
        rows.push(InputRow {
            name,
            modules: readers.into_iter().map(str::to_owned).collect(),
            expert: key.expert,
            tokens: input.tokens,
            file: file.to_owned(),
        });
    }
    let beside = out.join(format!("{file}.new"));
    let result = (|| {
        let mut to = std::io::BufWriter::new(File::create(&beside)?);
        to.write_all(&header(&tensors.iter().collect::<Vec<_>>(), Layout::Mlx))?;
        for (_, input, _) in inputs.iter() {
            let channels = input.magnitude.len();
            let mut row = vec![0.0; channels];
            for i in 0..channels {
                input.hessian.gather(i..i + 1, &mut row);
                for value in &row {
                    to.write_all(&value.to_le_bytes())?;
                }
            }
            for sum in &input.magnitude {
                to.write_all(&(*sum as f32).to_le_bytes())?;
            }
        }
        to.into_inner().map_err(std::io::IntoInnerError::into_error)?.sync_data()?;
        std::fs::rename(&beside, &path)?;
        file_digest(&path)
    })();
    Ok((rows, result.map_err(io("write", &path))?))
}

/// Writes the table of contents into `out`.
///
/// # Errors
/// Those of the file system.
pub(super) fn write_contents(
    out: &Path,
    plan: &Plan,
    text: CalibrationText,
    inputs: Vec<InputRow>,
    files: BTreeMap<String, Digest>,
) -> Result<(), CalibError> {
    let contents = Contents {
        format: FORMAT.to_owned(),
        model_type: plan.model.model_type.clone(),
        tensors_sha256: plan.checkpoint.shapes_digest(),
        basis: plan.basis(),
        text: Some(text),
        inputs,
        outputs: Vec::new(),
        files,
    };
    let path = out.join(CONTENTS);
    std::fs::write(&path, canonical_json(&contents)).map_err(io("write", &path))
}

/// Second moments that a file holds.
pub struct Moments {
    /// The table of contents.
    pub contents: Contents,
    checkpoint: Checkpoint,
}

impl Moments {
    /// Opens the table of contents at `path` and the files beside it, and checks that they are of the plan's model and
    /// basis.
    ///
    /// # Errors
    /// [`CalibError::NotMoments`], [`CalibError::OtherMoments`], [`CalibError::Io`]; those of the safetensors files.
    pub fn open(path: &Path, plan: &Plan) -> Outcome<Self> {
        let bad = |problem: String| CalibError::NotMoments { path: path.to_owned(), problem };
        let bytes = std::fs::read(path).map_err(io("read", path))?;
        let contents: Contents = serde_json::from_slice(&bytes).map_err(|error| bad(error.to_string()))?;
        if contents.format != FORMAT {
            return Err(bad(format!("its format is `{}`, not `{FORMAT}`", contents.format)).into());
        }
        let other = |what, found: String, needed: String| CalibError::OtherMoments {
            path: path.to_owned(),
            what,
            found,
            needed,
        };
        if contents.model_type != plan.model.model_type {
            return Err(other("model", contents.model_type, plan.model.model_type.clone()).into());
        }
        let needed = plan.checkpoint.shapes_digest();
        if contents.tensors_sha256 != needed {
            let found = contents.tensors_sha256.to_string();
            return Err(other("model", found, needed.to_string()).into());
        }
        if contents.basis != plan.basis() {
            return Err(other("basis", contents.basis, plan.basis()).into());
        }
        let folder = path.parent().unwrap_or(Path::new(""));
        let files = contents.inputs.iter().map(|row| &row.file);
        let files: BTreeSet<&String> = files.chain(contents.outputs.iter().map(|row| &row.file)).collect();
        for file in &files {
            let Some(needed) = contents.files.get(*file).filter(|_| is_plain(file)) else {
                return Err(bad(format!("it has no digest of `{file}`")).into());
            };
            let path = folder.join(file);
            let found = file_digest(&path).map_err(io("read", &path))?;
            if found != *needed {
                return Err(bad(format!("`{file}` has SHA-256 {found}, but should have {needed}")).into());
            }
        }
        let files: Vec<String> = files.into_iter().cloned().collect();
        let checkpoint = Checkpoint::open_files(folder, &files)?;
        Ok(Self { contents, checkpoint })
    }

    /// The second moments of what goes into a module; into each of its experts, if it has some.
    ///
    /// # Errors
    /// [`CalibError::NoMoments`] if there are none; [`CalibError::NotMoments`] for a matrix that is not of K channels,
    /// not symmetric, not finite, or negative on its diagonal; for an expert that the module has not; for two of the
    /// same inputs.
    pub(super) fn inputs(
        &self,
        path: &Path,
        module: &str,
        channels: usize,
        experts: Option<usize>,
    ) -> Result<Inputs, CalibError> {
        let rows = self.contents.inputs.iter().filter(|row| row.modules.iter().any(|m| m == module));
        let mut inputs = Inputs::default();
        for row in rows {
            let bad = |problem: String| CalibError::NotMoments { path: path.to_owned(), problem };
            is_of(row.expert, experts, module).map_err(|problem| bad(format!("`{}` {problem}", row.name)))?;
            let full = self.values(&format!("{}.hessian", row.name), &[channels, channels]).map_err(bad)?;
            check(|i, j| full[i * channels + j], channels)
                .map_err(|problem| bad(format!("`{}.hessian` {problem}", row.name)))?;
            let magnitude = self.values(&format!("{}.magnitude", row.name), &[channels]).unwrap_or_default();
            let input = Input {
                hessian: Symmetric::from_full(&full, channels),
                magnitude: magnitude.into_iter().map(f64::from).collect(),
                tokens: row.tokens,
            };
            if !inputs.insert(InputKey { module: module.to_owned(), expert: row.expert }, input) {
                return Err(bad(format!("`{}` is the second that says what goes into `{module}`", row.name)));
            }
        }
        if inputs.is_empty() {
            return Err(CalibError::NoMoments { path: path.to_owned(), module: module.to_owned() });
        }
        Ok(inputs)
    }

    /// Adds to `inputs` what errors in a module's outputs cost, of its experts each, if the file says.
    ///
    /// # Errors
    /// [`CalibError::NotMoments`] for a matrix that is not of N channels, not symmetric, not finite, or negative on its
    /// diagonal; for an expert that the module has not; for two of the same outputs.
    pub(super) fn outputs(
        &self,
        path: &Path,
        module: &str,
        channels: usize,
        experts: Option<usize>,
        inputs: &mut Inputs,
    ) -> Result<(), CalibError> {
        for row in self.contents.outputs.iter().filter(|row| row.module == module) {
            let bad = |problem: String| CalibError::NotMoments { path: path.to_owned(), problem };
            let name = format!("{}.output_hessian", row.name);
            is_of(row.expert, experts, module).map_err(|problem| bad(format!("`{name}` {problem}")))?;
            let whole = self.tensor(&name, &[channels, channels]);
            let packed = || self.tensor(&name, &[channels * (channels + 1) / 2]);
            let (values, is_packed) = match whole {
                Ok(values) => (values, false),
                Err(problem) => (packed().map_err(|_| bad(problem))?, true),
            };
            let get = |i: usize, j: usize| {
                let (i, j) = if is_packed { (i.min(j), i.max(j)) } else { (i, j) };
                let at = if is_packed { i * (2 * channels - i + 1) / 2 + j - i } else { i * channels + j };
                f32::from_le_bytes(values[at])
            };
            check(get, channels).map_err(|problem| bad(format!("`{name}` {problem}")))?;
            let key = InputKey { module: module.to_owned(), expert: row.expert };
            if !inputs.insert_outputs(key, Symmetric::from_lower(channels, get)) {
                return Err(bad(format!("`{name}` is the second of the same outputs of `{module}`")));
            }
        }
        Ok(())
    }

    /// A tensor's values, if it is f32 and of this shape.
    fn values(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>, String> {
        Ok(self.tensor(name, shape)?.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect())
    }

    fn tensor(&self, name: &str, shape: &[usize]) -> Result<&[[u8; 4]], String> {
        let entry = self.checkpoint.get(name).ok_or_else(|| format!("there is no tensor `{name}`"))?;
        let needed = Shape(shape.iter().map(|d| *d as u64).collect());
        if (entry.dtype, &entry.shape) != (Dtype::F32, &needed) {
            return Err(format!("`{name}` is {} {}, not F32 {needed}", entry.dtype, entry.shape));
        }
        Ok(self.checkpoint.bytes(entry).as_chunks::<4>().0)
    }
}

/// Whether a module of so many experts, or of none, has this one.
fn is_of(expert: Option<usize>, experts: Option<usize>, module: &str) -> Result<(), String> {
    match (expert, experts) {
        (None, None) => Ok(()),
        (Some(expert), Some(experts)) if expert < experts => Ok(()),
        (Some(expert), _) => Err(format!("is of expert {expert} of `{module}`, which has none such")),
        (None, Some(_)) => Err(format!("is of no expert, but `{module}` has experts")),
    }
}

/// What is wrong with a matrix of second moments.
fn check(get: impl Fn(usize, usize) -> f32, n: usize) -> Result<(), String> {
    let all = (0..n * n).map(|at| (at / n, at % n));
    if let Some((i, j)) = all.into_iter().find(|(i, j)| !get(*i, *j).is_finite()) {
        return Err(format!("holds {} at [{i}, {j}]", get(i, j)));
    }
    for i in 0..n {
        let diagonal = get(i, i);
        if diagonal < 0.0 {
            return Err(format!("holds {diagonal} at [{i}, {i}], which is no mean of squares"));
        }
        for j in 0..i {
            let (a, b) = (get(i, j), get(j, i));
            if (a - b).abs() > ASYMMETRY * diagonal.max(get(j, j)) {
                return Err(format!("is not symmetric: {a} at [{i}, {j}], but {b} at [{j}, {i}]"));
            }
        }
    }
    Ok(())
}
