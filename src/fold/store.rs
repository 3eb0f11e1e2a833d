//! The artifact that a plan would give, as the runtime reads it, without a file.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use super::Prepared;
use crate::arch::{Config, Folder, Packing};
use crate::backend::Stored;
use crate::checkpoint::TensorEntry;
use crate::encode::{EncodeError, Encoded, Scratch, encode_rows, release_rows};
use crate::failure::{Failure as _, Outcome};
use crate::plan::{Module, Plan};
use crate::runtime::{RuntimeError, Store, Weights};

const HELD: &str = "nobody panics with it";

/// Makes rows of stored tensors when they are asked for, with the bytes that a build would write.
///
/// What was made last is kept, since the planes of a module are asked for one after the other.
pub struct Planned {
    plan: Arc<Plan>,
    prepared: Arc<Prepared>,
    entries: Vec<TensorEntry>,
    /// Module and plane of each entry, by name.
    by_name: BTreeMap<String, usize>,
    of: Vec<(usize, usize)>,
    last: Mutex<Option<Made>>,
    /// Everything handed out and not released, and buffers to use again: fresh memory costs more than what is put in it.
    handed: Mutex<Vec<Arc<Vec<u8>>>>,
    spare: Mutex<Vec<Vec<u8>>>,
}

struct Made {
    module: usize,
    rows: Range<u64>,
    planes: Vec<Arc<Vec<u8>>>,
}

impl fmt::Debug for Planned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the plan of `{}`", self.plan.recipe.name)
    }
}

impl Planned {
    /// The main tensors of the plan's artifact.
    pub fn new(plan: Arc<Plan>, prepared: Arc<Prepared>) -> Self {
        let (mut entries, mut of, mut by_name) = (Vec::new(), Vec::new(), BTreeMap::new());
        let main = plan.modules.iter().enumerate().filter(|(_, m)| m.output.folder == Folder::Main);
        for (index, module) in main {
            for (plane, (stored, place)) in module.stored.iter().zip(&module.places).enumerate() {
                by_name.insert(stored.name.clone(), entries.len());
                of.push((index, plane));
                entries.push(TensorEntry {
                    name: stored.name.clone(),
                    dtype: stored.dtype,
                    shape: stored.shape.clone(),
                    file: place.file,
                    range: place.offset..place.offset + stored.bytes,
                });
            }
        }
        let (last, handed, spare) = (Mutex::new(None), Mutex::default(), Mutex::default());
        Self { plan, prepared, entries, by_name, of, last, handed, spare }
    }

    /// The model in it.
    ///
    /// # Errors
    /// As [`Weights::open`] of the built artifact.
    pub fn open(plan: &Arc<Plan>, prepared: &Arc<Prepared>) -> Outcome<Weights> {
        let config = plan.side.iter().find(|file| file.name == "config.json");
        let config = config.expect("every plan generates a config");
        let root = serde_json::from_slice(&config.bytes).expect("generated just now");
        let (config, packing): (Config, Packing) = Config::packed(root)?;
        let store = Self::new(plan.clone(), prepared.clone());
        Weights::of(&plan.source.dir, config, &packing, Arc::new(store), &|_| false)
    }

    /// Takes back the buffers that nobody reads any more.
    fn reclaim(&self) {
        let mut handed = self.handed.lock().expect(HELD);
        let mut still = Vec::new();
        for buffer in handed.drain(..) {
            match Arc::try_unwrap(buffer) {
                Ok(buffer) => self.spare.lock().expect(HELD).push(buffer),
                Err(buffer) => still.push(buffer),
            }
        }
        *handed = still;
    }

    /// So many bytes of any content: the smallest spare buffer that holds them and is not much larger, or a new one.
    fn buffer(&self, len: usize) -> Vec<u8> {
        let mut spare = self.spare.lock().expect(HELD);
        let fits = |buffer: &Vec<u8>| (len..=2 * len).contains(&buffer.capacity());
        let fitting = spare.iter().enumerate().filter(|(_, buffer)| fits(buffer));
        match fitting.min_by_key(|(_, buffer)| buffer.capacity()).map(|(index, _)| index) {
            Some(index) => {
                let mut buffer = spare.swap_remove(index);
                buffer.resize(len, 0);
                buffer
            }
            None => vec![0; len],
        }
    }

    /// All planes of the rows, made on the plan's threads.
    fn make(
        &self,
        module: &Module,
        index: usize,
        rows: Range<u64>,
    ) -> Result<Vec<Arc<Vec<u8>>>, EncodeError> {
        let work = self.prepared.work(index);
        let layout = work.planes();
        let bytes = |rows: &Range<u64>| {
            layout.iter().map(move |plane| plane.bytes_of(plane.begun(rows.clone()))).collect::<Vec<usize>>()
        };
        let mut planes: Vec<Vec<u8>> = bytes(&rows).into_iter().map(|bytes| self.buffer(bytes)).collect();
        // Panels are what may be encoded alone; rows that begin or end inside one are of modules made row by row.
        let cuts = module.panels.iter().map(|panel| panel.start.max(rows.start)..panel.end.min(rows.end));
        let mut parts = Vec::new();
        let mut rest: Vec<&mut [u8]> = planes.iter_mut().map(Vec::as_mut_slice).collect();
        for part in cuts.filter(|part| part.start < part.end) {
            let here = rest.iter_mut().zip(bytes(&part));
            let here = here.map(|(rest, bytes)| rest.split_off_mut(..bytes).expect("counted above"));
            parts.push((part, here.collect::<Vec<&mut [u8]>>()));
        }
        parts.reverse();
        let (parts, failed) = (Mutex::new(parts), Mutex::new(None::<(u64, EncodeError)>));
        let worker = || {
            let mut scratch = Scratch::default();
            while let Some((part, to)) = { parts.lock().expect(HELD).pop() } {
                let start = part.start;
                match encode_rows(&self.plan, module, work, part.clone(), &mut scratch) {
                    Ok(Encoded { planes, .. }) => {
                        to.into_iter().zip(planes).for_each(|(to, plane)| to.copy_from_slice(plane));
                    }
                    Err(error) => {
                        let mut failed = failed.lock().expect(HELD);
                        if failed.as_ref().is_none_or(|(first, _)| start < *first) {
                            *failed = Some((start, error));
                        }
                    }
                }
                release_rows(&self.plan, module, &part);
            }
        };
        std::thread::scope(|scope| {
            for _ in 1..self.plan.threads {
                scope.spawn(worker);
            }
            worker();
        });
        match failed.into_inner().expect("all threads have ended") {
            Some((_, error)) => Err(error),
            None => {
                let planes: Vec<Arc<Vec<u8>>> = planes.into_iter().map(Arc::new).collect();
                self.handed.lock().expect(HELD).extend(planes.iter().cloned());
                Ok(planes)
            }
        }
    }
}

impl Store for Planned {
    fn tensors(&self) -> &[TensorEntry] {
        &self.entries
    }

    fn get(&self, name: &str) -> Option<&TensorEntry> {
        self.by_name.get(name).map(|index| &self.entries[*index])
    }

    fn file(&self, entry: &TensorEntry) -> PathBuf {
        self.plan.files[entry.file].name.clone().into()
    }

    fn rows(&self, entry: &TensorEntry, rows: Range<u64>, of: u64) -> Result<Stored, RuntimeError> {
        let (index, plane) = self.of[self.by_name[&entry.name]];
        let module = &self.plan.modules[index];
        let row = entry.bytes() / of;
        let bytes = rows.start * row..rows.end * row;
        let each = entry.bytes() / module.rows;
        // Rows that are encoded together are made together, all of them. Floats in their own basis are cut after the first
        // axis, and asked for by rows of the last.
        let rows = match module.planes.iter().any(|plane| plane.height > 1) {
            true => 0..module.rows,
            false => bytes.start / each..bytes.end.div_ceil(each),
        };
        let mut last = self.last.lock().expect(HELD);
        if !last.as_ref().is_some_and(|made| made.module == index && made.rows == rows) {
            *last = None;
            self.reclaim();
            let planes = self
                .make(module, index, rows.clone())
                .map_err(|error| RuntimeError::Unmade { problem: error.to_string(), help: error.help() })?;
            *last = Some(Made { module: index, rows: rows.clone(), planes });
        }
        let made = last.as_ref().expect("made just now").planes[plane].clone();
        // `each` is of no use where rows share some of the tensor; then they begin with the first.
        let before = rows.start * each;
        Ok(Stored::Owned(made, (bytes.start - before) as usize..(bytes.end - before) as usize))
    }

    fn release(&self, _entry: &TensorEntry) {
        *self.last.lock().expect(HELD) = None;
        self.reclaim();
    }
}
