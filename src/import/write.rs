//! Carries a plan out: strip by strip into files of their final size, then the record, then the rename.

use std::collections::BTreeMap;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use super::exl3::Values;
use super::record::{SourceCheckpoint, VERSION};
use super::{BLOCK, IMPORTED, ImportError, Imported, ImportedModule, Item, Plan, WORK};
use crate::build::Progress;
use crate::build::schedule::{Ended, Schedule};
use crate::checkpoint::{Links, SMALL_LIMIT, read_small};
use crate::codec::trellis::Code;
use crate::digest::{Digest, canonical_json};
use crate::failure::Outcome;
use crate::isa::Isa;
use crate::numeric::{first_non_finite, narrow};
use crate::process::free_space;
use crate::repack::{Growing, RepackError, digests};
use crate::tool::Tool;

/// Bytes that are copied at a time.
const PIECE: u64 = 16 << 20;

/// How to carry a plan out. None of it decides a byte.
pub struct Options<'a> {
    /// The new folder.
    pub target: &'a Path,
    /// Who works.
    pub threads: usize,
    /// Raised to stop.
    pub stop: &'a AtomicBool,
    /// Who is told.
    pub progress: &'a dyn Progress,
}

/// A piece of work; numbers are of items.
enum Job {
    /// Bytes of a tensor that is kept, counted from its start.
    Copy(usize, Range<u64>),
    /// A strip of 128 rows of a packed module, and its number among all strips.
    Decode(usize, usize, usize),
}

/// What a thread works in.
#[derive(Default)]
struct Scratch {
    values: Vec<f32>,
    bytes: Vec<u8>,
}

impl Plan {
    /// Writes the folder, and returns its record and the record's digest.
    ///
    /// # Errors
    /// [`ImportError`], or the checkpoint's if a file changed meanwhile. Nothing is left behind then.
    pub fn write(&self, options: &Options<'_>) -> Outcome<(Imported, Digest)> {
        let growing = Growing::take(options.target, WORK).map_err(ImportError::from)?;
        let out = growing.out();
        let needed = self.bytes();
        let free = free_space(&out).map_err(ImportError::io("ask the space of", &out))?;
        if free < needed {
            return Err(ImportError::from(RepackError::DiskSpace { path: out, needed, free }).into());
        }
        let modules = self.write_weights(&out, options)?;
        options.progress.phase("checking");
        let digests = |dir: &Path, names: &mut dyn Iterator<Item = &String>| {
            digests(dir, names, options.threads, options.stop).map_err(ImportError::from)
        };
        let mut read = digests(self.checkpoint.dir(), &mut self.checkpoint.files().iter().map(|f| &f.name))?;
        read.insert("config.json".to_owned(), self.config);
        let mut files = digests(&out, &mut self.files.iter().map(|file| &file.name))?;
        self.checkpoint.check_unchanged()?;
        for (name, bytes) in &self.generated {
            files.insert(name.clone(), put(&out.join(name), bytes)?);
        }
        for file in &self.copied {
            let bytes = read_small(&file.path, &Links::of_folder(self.checkpoint.dir()), SMALL_LIMIT)?;
            if Digest::of(&bytes) != file.sha256 {
                return Err(ImportError::from(RepackError::CopyChanged { path: file.path.clone() }).into());
            }
            files.insert(file.name.clone(), put(&out.join(&file.name), &bytes)?);
        }
        let record = Imported {
            version: VERSION,
            tool: Tool::this(),
            source: SourceCheckpoint { format: "exl3", files: read },
            to: self.float.to_string(),
            kept: self.items.len() - modules.len(),
            modules,
            files,
        };
        let bytes = canonical_json(&record);
        let digest = put(&out.join(IMPORTED), &bytes)?;
        if options.stop.load(Ordering::Relaxed) {
            return Err(ImportError::from(RepackError::Interrupted).into());
        }
        growing.publish().map_err(ImportError::from)?;
        Ok((record, digest))
    }

    /// Writes every weight file; what was decoded.
    fn write_weights(&self, out: &Path, options: &Options<'_>) -> Result<Vec<ImportedModule>, ImportError> {
        let create = |name: &str, len: u64, header: &[u8]| {
            let path = out.join(name);
            let file = File::create_new(&path).and_then(|file| {
                file.set_len(len)?;
                file.write_all_at(header, 0)?;
                Ok(file)
            });
            file.map_err(ImportError::io("create", &path))
        };
        let files = self.files.iter().map(|file| create(&file.name, file.len, &file.header));
        let files: Vec<File> = files.collect::<Result<_, _>>()?;
        // One number for each strip, summed up in order whoever did it when.
        let (mut strips, mut jobs) = (Vec::new(), Schedule::default());
        for (number, item) in self.items.iter().enumerate() {
            match item {
                Item::Kept(entry) => {
                    for start in (0..entry.bytes()).step_by(PIECE as usize) {
                        jobs.add(Job::Copy(number, start..entry.bytes().min(start + PIECE)), []);
                    }
                }
                Item::Packed { linear, .. } => {
                    for block in 0..linear.shape().rows() as usize / BLOCK {
                        jobs.add(Job::Decode(number, block, strips.len()), []);
                        strips.push(number);
                    }
                }
            }
        }
        let energies: Vec<AtomicU64> = strips.iter().map(|_| AtomicU64::default()).collect();
        let mut left: Vec<AtomicUsize> = self.items.iter().map(|_| AtomicUsize::new(0)).collect();
        strips.iter().for_each(|number| *left[*number].get_mut() += 1);
        let scratch: Vec<Mutex<Scratch>> = (0..options.threads).map(|_| Mutex::default()).collect();
        let values = [Code::ThreeInst, Code::Mcg, Code::Mul1].map(|code| (code, Values::new(code)));
        let modules = self.items.iter().filter(|item| matches!(item, Item::Packed { .. })).count() as u64;
        options.progress.begin(self.source_bytes().0, modules, 0, 0);
        let ended = jobs.run(options.threads, options.stop, |thread, job| {
            match job {
                Job::Copy(number, bytes) => {
                    let Item::Kept(entry) = &self.items[*number] else {
                        unreachable!("only these are copied")
                    };
                    let stored = &self.checkpoint.bytes(entry)[bytes.start as usize..bytes.end as usize];
                    self.put(&files, *number, bytes.start, stored)?;
                    let begin = entry.range.start;
                    self.checkpoint.release(entry.file, begin + bytes.start..begin + bytes.end);
                    options.progress.panel(bytes.end - bytes.start);
                }
                Job::Decode(number, block, strip) => {
                    let Item::Packed { module, linear } = &self.items[*number] else {
                        unreachable!("only these are decoded")
                    };
                    let mut scratch = scratch[thread].lock().expect("each thread has its own");
                    let values = values.iter().find(|(code, _)| *code == linear.code);
                    let Scratch { values: rows, bytes } = &mut *scratch;
                    let in_features = linear.shape().last() as usize;
                    rows.resize(BLOCK * in_features, 0.0);
                    linear.decode(&self.checkpoint, &values.expect("all three").1, *block, rows);
                    bytes.resize(rows.len() * self.float.bytes(), 0);
                    if !narrow(self.float, rows, bytes, Isa::best())
                        && let Some(at) = first_non_finite(self.float, bytes)
                    {
                        let row = (block * BLOCK + at / in_features) as u64;
                        return Err(ImportError::NonFinite {
                            module: module.clone(),
                            row,
                            float: self.float,
                        });
                    }
                    self.put(&files, *number, (block * bytes.len()) as u64, bytes)?;
                    let energy: f64 = rows.iter().map(|w| f64::from(*w) * f64::from(*w)).sum();
                    energies[*strip].store(energy.to_bits(), Ordering::Relaxed);
                    options.progress.panel(linear.bytes() * BLOCK as u64 / linear.shape().rows());
                    if left[*number].fetch_sub(1, Ordering::Relaxed) == 1 {
                        linear.release(&self.checkpoint);
                        options.progress.module(module);
                    }
                }
            }
            Ok(())
        });
        match ended {
            Ok(()) => {}
            Err(Ended::Stopped) => return Err(RepackError::Interrupted.into()),
            Err(Ended::Failed(error)) => return Err(error),
        }
        let mut sums: BTreeMap<usize, f64> = BTreeMap::new();
        for (number, energy) in strips.into_iter().zip(energies) {
            *sums.entry(number).or_default() += f64::from_bits(energy.into_inner());
        }
        let modules = sums.into_iter().map(|(number, energy)| {
            let Item::Packed { module, linear } = &self.items[number] else {
                unreachable!("only these have strips")
            };
            let (shape, bits, code) = (linear.shape(), linear.bits(), linear.code.to_string());
            ImportedModule { module: module.clone(), shape, bits, code, energy }
        });
        Ok(modules.collect())
    }

    fn put(&self, files: &[File], item: usize, at: u64, bytes: &[u8]) -> Result<(), ImportError> {
        let place = self.places[item];
        let failed = |error| ImportError::io("write", Path::new(&self.files[place.file].name))(error);
        files[place.file].write_all_at(bytes, place.offset + at).map_err(failed)
    }
}

/// Writes a small file; its digest.
fn put(path: &Path, bytes: &[u8]) -> Result<Digest, ImportError> {
    std::fs::write(path, bytes).map_err(ImportError::io("write", path))?;
    Ok(Digest::of(bytes))
}
