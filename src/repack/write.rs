//! Carries a plan out: strip by strip into files of their final size, then the record, then the rename.

use std::collections::BTreeMap;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use super::record::{SourceArtifact, VERSION};
use super::{Change, Growing, Item, Plan, REPACKED, RepackError, Repacked, RepackedModule, WORK};
use crate::artifact::card::repacked_card;
use crate::artifact::open::file_digest;
use crate::artifact::{MACHINE, PROVENANCE};
use crate::build::Progress;
use crate::build::schedule::{Ended, Schedule};
use crate::codec::{Matrix, Part, codec};
use crate::digest::{Digest, canonical_json};
use crate::failure::Outcome;
use crate::isa::Isa;
use crate::process::free_space;
use crate::quant::{CAST, RowLoss, Rows, quantizer};
use crate::tool::Tool;
use crate::units::Bytes;

/// Elements of a strip, unless the rows of one tile are more.
const STRIP: u64 = 1 << 18;
/// Bytes that are copied at a time.
const PIECE: u64 = 16 << 20;
/// Name of the model card.
const CARD: &str = "README.md";

/// How to carry a plan out. None of it decides a byte.
pub struct Options<'a> {
    /// The new folder.
    pub target: &'a Path,
    /// Who works.
    pub threads: usize,
    /// Kernels of the encoders.
    pub isa: Isa,
    /// Raised to stop.
    pub stop: &'a AtomicBool,
    /// Who is told.
    pub progress: &'a dyn Progress,
}

/// A piece of work; numbers are of items.
enum Job {
    /// Bytes of a tensor that is kept, counted from its start.
    Copy(usize, Range<u64>),
    /// Rows of a module that changes, and the number of the strip.
    Repack(usize, Range<u64>, usize),
}

/// What a thread works in.
#[derive(Default)]
struct Scratch {
    values: Vec<f32>,
    planes: Vec<Vec<u8>>,
    losses: Vec<RowLoss>,
}

impl Plan {
    /// Bytes of the weight files that will be written.
    pub fn bytes(&self) -> Bytes {
        Bytes(self.files.iter().map(|file| file.len).sum())
    }

    /// Bytes of the artifact's weight files.
    pub fn source_bytes(&self) -> Bytes {
        let files = self.sources.iter().flat_map(|source| source.checkpoint.files());
        Bytes(files.map(|file| file.len).sum())
    }

    /// Writes the folder, and returns its record and the record's digest.
    ///
    /// # Errors
    /// [`RepackError`], or the checkpoint's if a file changed meanwhile. Nothing is left behind then.
    pub fn write(&self, options: &Options<'_>) -> Outcome<(Repacked, Digest)> {
        let growing = Growing::take(options.target, WORK)?;
        let out = growing.out();
        let (needed, free) =
            (self.bytes(), free_space(&out).map_err(RepackError::io("ask the space of", &out))?);
        if free < needed {
            return Err(RepackError::DiskSpace { path: out, needed, free }.into());
        }
        let losses = self.write_weights(&out, options)?;
        options.progress.phase("writing");
        for source in &self.sources {
            source.checkpoint.check_unchanged()?;
        }
        let names = self.files.iter().map(|file| &file.name);
        let mut files = digests(&out, names, options.threads, options.stop)?;
        let changes = self.items.iter().filter_map(|item| item.change.as_ref());
        let modules: Vec<RepackedModule> =
            changes.zip(losses).map(|(change, loss)| change.record(loss)).collect();
        let mut side = self.side()?;
        side.insert(CARD.to_owned(), self.card(&modules)?);
        for (name, bytes) in side {
            write(&out.join(&name), &bytes)?;
            files.insert(name, Digest::of(&bytes));
        }
        let record = Repacked {
            version: VERSION,
            tool: Tool::this(),
            source: SourceArtifact {
                digest: self.artifact.digest,
                recipe: self.artifact.provenance.recipe.name.clone(),
            },
            to: self.target.wanted().to_string(),
            all: self.all,
            modules,
            files,
        };
        let bytes = canonical_json(&record);
        write(&out.join(REPACKED), &bytes)?;
        if options.stop.load(Ordering::Relaxed) {
            return Err(RepackError::Interrupted.into());
        }
        growing.publish()?;
        Ok((record, Digest::of(&bytes)))
    }

    /// Writes every weight file; the loss of each module that changes.
    fn write_weights(&self, out: &Path, options: &Options<'_>) -> Outcome<Vec<RowLoss>> {
        let create = |name: &str, len: u64, header: &[u8]| {
            let path = out.join(name);
            let made = path.parent().map_or(Ok(()), std::fs::create_dir_all).and_then(|()| {
                let file = File::create_new(&path)?;
                file.set_len(len)?;
                file.write_all_at(header, 0)?;
                Ok(file)
            });
            made.map_err(RepackError::io("create", &path))
        };
        let files: Vec<File> = self
            .files
            .iter()
            .map(|file| create(&file.name, file.len, &file.header))
            .collect::<Result<_, _>>()?;
        // One number for each strip, summed up in order whoever did it when.
        let (mut strips, mut jobs) = (Vec::new(), Schedule::default());
        for (number, item) in self.items.iter().enumerate() {
            let Some(change) = &item.change else {
                let bytes = item.planes[0].bytes();
                for start in (0..bytes).step_by(PIECE as usize) {
                    jobs.add(Job::Copy(number, start..bytes.min(start + PIECE)), []);
                }
                continue;
            };
            let rows = change.shape.rows();
            let tall = change.strip();
            let count = rows.div_ceil(tall) as usize;
            for (strip, start) in (0..rows).step_by(tall as usize).enumerate() {
                jobs.add(Job::Repack(number, start..rows.min(start + tall), strips.len() + strip), []);
            }
            strips.extend(std::iter::repeat_n(number, count));
        }
        let losses: Vec<[AtomicU64; 2]> = strips.iter().map(|_| Default::default()).collect();
        let mut left: Vec<AtomicUsize> = self.items.iter().map(|_| AtomicUsize::new(0)).collect();
        strips.iter().for_each(|number| *left[*number].get_mut() += 1);
        let scratch: Vec<Mutex<Scratch>> = (0..options.threads).map(|_| Mutex::default()).collect();
        let modules = self.items.iter().filter(|item| item.change.is_some()).count() as u64;
        options.progress.begin(self.source_bytes().0, modules, 0, 0);
        let ended = jobs.run(options.threads, options.stop, |thread, job| {
            match job {
                Job::Copy(number, bytes) => {
                    self.copy(*number, bytes.clone(), &files)?;
                    options.progress.panel(bytes.end - bytes.start);
                }
                Job::Repack(number, rows, strip) => {
                    let Item { planes, change, .. } = &self.items[*number];
                    let change = change.as_ref().expect("only these are repacked");
                    let mut scratch = scratch[thread].lock().expect("each thread has its own");
                    let loss = self.repack(*number, rows.clone(), &files, options.isa, &mut scratch)?;
                    losses[*strip][0].store(loss.error.to_bits(), Ordering::Relaxed);
                    losses[*strip][1].store(loss.energy.to_bits(), Ordering::Relaxed);
                    let bytes: u64 = planes.iter().map(|entry| entry.bytes()).sum();
                    options.progress.panel(bytes * (rows.end - rows.start) / change.shape.rows());
                    if left[*number].fetch_sub(1, Ordering::Relaxed) == 1 {
                        options.progress.module(&change.module);
                    }
                }
            }
            Ok(())
        });
        match ended {
            Ok(()) => {}
            Err(Ended::Stopped) => return Err(RepackError::Interrupted.into()),
            Err(Ended::Failed(error)) => {
                let error: RepackError = error;
                return Err(error.into());
            }
        }
        let mut sums: BTreeMap<usize, RowLoss> = BTreeMap::new();
        for (number, [error, energy]) in strips.into_iter().zip(losses) {
            let [error, energy] = [error, energy].map(|bits| f64::from_bits(bits.into_inner()));
            *sums.entry(number).or_default() += RowLoss { error, energy };
        }
        Ok(sums.into_values().collect())
    }

    /// Copies bytes of a tensor.
    fn copy(&self, number: usize, bytes: Range<u64>, files: &[File]) -> Result<(), RepackError> {
        let item = &self.items[number];
        let (checkpoint, entry) = (&self.sources[item.source].checkpoint, &item.planes[0]);
        let place = self.places[number][0];
        let stored = &checkpoint.bytes(entry)[bytes.start as usize..bytes.end as usize];
        self.put(files, place.file, place.offset + bytes.start, stored)?;
        checkpoint.release(entry.file, entry.range.start + bytes.start..entry.range.start + bytes.end);
        Ok(())
    }

    /// Decodes rows of a module and encodes them again; what that cost.
    fn repack(
        &self,
        number: usize,
        rows: Range<u64>,
        files: &[File],
        isa: Isa,
        scratch: &mut Scratch,
    ) -> Result<RowLoss, RepackError> {
        let Item { source, planes: entries, change, .. } = &self.items[number];
        let change = change.as_ref().expect("only these are repacked");
        let checkpoint = &self.sources[*source].checkpoint;
        let matrix = Matrix::of(&change.shape);
        let (count, in_features) = ((rows.end - rows.start) as usize, matrix.in_features as usize);
        let Scratch { values, planes, losses } = scratch;

        let stored = entries.iter().zip(change.layout_was()).map(|(entry, plane)| {
            let held = plane.covering(rows.clone());
            &checkpoint.bytes(entry)[plane.bytes_of(0..held.start)..plane.bytes_of(0..held.end)]
        });
        let stored: Vec<&[u8]> = stored.collect();
        values.resize(count * in_features, 0.0);
        codec(change.was).decode(Part { matrix, first: rows.start }, change.float_was, &stored, values);
        if let Some(at) = values.iter().position(|value| !value.is_finite()) {
            let row = rows.start + (at / in_features) as u64;
            return Err(RepackError::NonFinite { module: change.module.clone(), row });
        }
        for (entry, plane) in entries.iter().zip(change.layout_was()) {
            // What belongs to a matrix is read again by its next rows.
            if plane.height < matrix.out_features {
                let held = plane.begun(rows.clone());
                let at = |row: u64| entry.range.start + row * plane.row_bytes();
                checkpoint.release(entry.file, at(held.start)..at(held.end));
            }
        }

        let layout = change.layout();
        planes.resize_with(layout.len().max(planes.len()), Vec::new);
        for (bytes, plane) in planes.iter_mut().zip(&layout) {
            bytes.resize(plane.bytes_of(plane.begun(rows.clone())), 0);
        }
        losses.resize(count, RowLoss::default());
        let encoder = quantizer(if change.became.quantizes() { "mlx" } else { CAST });
        let rows_in = Rows { values, in_features, float: change.float, ahead: &[] };
        let mut slices: Vec<&mut [u8]> = planes[..layout.len()].iter_mut().map(Vec::as_mut_slice).collect();
        let fitted =
            encoder.expect("both are quantizers").fit(change.became, rows_in, isa, &mut slices, losses);
        fitted.map_err(|problem| RepackError::Encode {
            module: change.module.clone(),
            row: rows.start + problem.row() as u64,
            problem,
        })?;
        for ((bytes, plane), place) in planes.iter().zip(&layout).zip(&self.places[number]) {
            let before = plane.bytes_of(0..plane.begun(rows.clone()).start) as u64;
            self.put(files, place.file, place.offset + before, bytes)?;
        }
        let mut sum = RowLoss::default();
        losses.iter().for_each(|loss| sum += *loss);
        Ok(sum)
    }

    fn put(&self, files: &[File], file: usize, at: u64, bytes: &[u8]) -> Result<(), RepackError> {
        let failed = |error| RepackError::io("write", Path::new(&self.files[file].name))(error);
        files[file].write_all_at(bytes, at).map_err(failed)
    }

    /// Files beside the weights: written anew, or those of the artifact.
    fn side(&self) -> Result<BTreeMap<String, Vec<u8>>, RepackError> {
        let mut side = self.generated.clone();
        let weights: Vec<&str> = self.files.iter().map(|file| file.name.as_str()).collect();
        for (name, needed) in &self.artifact.provenance.files {
            let others = [CARD, PROVENANCE, MACHINE, REPACKED];
            if weights.contains(&name.as_str()) || others.contains(&name.as_str()) || side.contains_key(name)
            {
                continue;
            }
            side.insert(name.clone(), self.read(name, *needed)?);
        }
        Ok(side)
    }

    /// A small file of the artifact, which must still be what the record says.
    fn read(&self, name: &str, needed: Digest) -> Result<Vec<u8>, RepackError> {
        let path = self.artifact.dir.join(name);
        let bytes = std::fs::read(&path).map_err(RepackError::io("read", &path))?;
        if Digest::of(&bytes) == needed { Ok(bytes) } else { Err(RepackError::CopyChanged { path }) }
    }

    /// The model card: the artifact's head, and what became of it.
    fn card(&self, modules: &[RepackedModule]) -> Result<Vec<u8>, RepackError> {
        let record = &self.artifact.provenance;
        let old =
            record.files.get(CARD).map(|needed| self.read(CARD, *needed)).transpose()?.unwrap_or_default();
        let mut rows: BTreeMap<(&str, &str), usize> = BTreeMap::new();
        for module in modules {
            *rows.entry((&module.was, &module.became)).or_default() += 1;
        }
        let tool = Tool::this();
        let tool = format!("{} {}", tool.name, tool.version);
        let digest = self.artifact.digest;
        Ok(repacked_card(&String::from_utf8_lossy(&old), &record.recipe.name, digest, &tool, &rows))
    }
}

impl Change {
    /// Rows of a strip: those of whole tiles.
    fn strip(&self) -> u64 {
        let in_features = self.shape.last();
        // Codes come first, and a matrix's own scales cover any rows of it.
        let tile = self.layout_was()[0].height;
        tile * (STRIP / (tile * in_features).max(1)).max(1)
    }

    fn record(&self, loss: RowLoss) -> RepackedModule {
        RepackedModule {
            module: self.module.clone(),
            shape: self.shape.clone(),
            was: self.was.to_string(),
            became: self.became.to_string(),
            relative_mse: (loss.energy > 0.0).then(|| loss.error / loss.energy),
        }
    }
}

fn write(path: &Path, bytes: &[u8]) -> Result<(), RepackError> {
    let made = path.parent().map_or(Ok(()), std::fs::create_dir_all);
    made.and_then(|()| std::fs::write(path, bytes)).map_err(RepackError::io("write", path))
}

/// Digests of files of a folder, by name.
///
/// # Errors
/// [`RepackError::Io`] of the first that cannot be read; [`RepackError::Interrupted`].
pub(crate) fn digests<'a>(
    dir: &Path,
    names: impl Iterator<Item = &'a String>,
    threads: usize,
    stop: &AtomicBool,
) -> Result<BTreeMap<String, Digest>, RepackError> {
    let mut jobs = Schedule::default();
    names.for_each(|name| {
        jobs.add(name, []);
    });
    let found = Mutex::new(BTreeMap::new());
    let ended = jobs.run(threads, stop, |_, name| {
        let path = dir.join(name);
        let digest = file_digest(&path).map_err(RepackError::io("read", &path))?;
        found.lock().expect("inserting does not panic").insert((*name).clone(), digest);
        Ok(())
    });
    match ended {
        Ok(()) => Ok(found.into_inner().expect("all threads have ended")),
        Err(Ended::Stopped) => Err(RepackError::Interrupted),
        Err(Ended::Failed(error)) => Err(error),
    }
}
