//! The jobs of a build and what they leave behind.
//!
//! For every piece of every source tensor, in file order: the file's digest goes on, the tensor's digest
//! goes on, the panels that begin in the piece are encoded and written to their places. When a module's
//! last panel is written it is sealed: its planes are read back and digested, its losses are added up in
//! row order, and a line is journaled. The digests of the artifact's files follow in their own order.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::ops::Range;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::schedule::{Ended, Schedule};
use super::staging::{Entry, SealedModule, Staging};
use super::{BuildError, Progress};
use crate::digest::{Digest, Hasher};
use crate::encode::{self, Encoded, encode_panel, release_panel};
use crate::fold::Prepared;
use crate::plan::{Module, Plan};

use crate::process::{Raise, is_same_file};
use crate::quant::{Repairs, RowLoss};

/// Bytes of a source that one digest job reads: what may be resident of it at a time, per thread.
const PIECE: u64 = 16 << 20;

/// Bytes that are read back at a time.
const READ_BACK: usize = 1 << 18;

/// How often dirty pages are sent on their way to the disk, so that the last sync is short.
const FLUSH_EVERY: Duration = Duration::from_millis(250);

/// What a finished run knows.
#[derive(Debug)]
pub struct Results {
    /// Digest of each source file.
    pub source_files: Vec<Digest>,
    /// Digest of each source tensor's payload.
    pub source_tensors: Vec<Digest>,
    /// Each module.
    pub modules: Vec<SealedModule>,
    /// Digest of each weight file of the artifact.
    pub output_files: Vec<Digest>,
    /// Modules that an earlier build had finished.
    pub resumed_modules: usize,
}

#[derive(Debug)]
enum Job {
    /// Goes on with the digests of a source file and of the tensor that the range belongs to.
    Source { file: usize, range: Range<u64>, tensor: Option<usize> },
    /// Encodes a panel and writes its planes.
    Panel { module: usize, panel: usize },
    /// Reads a finished module back, digests its planes and journals it.
    Seal { module: usize },
    /// Checks a module that the journal calls finished; encodes it again if its bytes differ.
    Recheck { module: usize },
    /// Goes on with a weight file's digest.
    OutputFile { file: usize, range: Range<u64>, last: bool },
}

/// A module under way.
#[derive(Debug, Default)]
struct Progressing {
    losses: Vec<Vec<RowLoss>>,
    repairs: Repairs,
}

/// Buffers that a thread uses again and again.
#[derive(Debug, Default)]
struct Scratch {
    encode: encode::Scratch,
    read_back: Vec<u8>,
}

/// A digest under way and then done.
#[derive(Default)]
struct Chain {
    hasher: Hasher,
    done: Option<Digest>,
}

struct Run<'a> {
    plan: &'a Plan,
    prepared: &'a Prepared,
    staging: &'a Staging,
    progress: &'a dyn Progress,
    outputs: Vec<(PathBuf, File)>,
    source_files: Vec<Mutex<Chain>>,
    source_tensors: Vec<Mutex<Chain>>,
    output_files: Vec<Mutex<Chain>>,
    modules: Vec<Mutex<Progressing>>,
    sealed: Vec<Mutex<Option<SealedModule>>>,
    scratch: Vec<Mutex<Scratch>>,
}

impl Chain {
    /// Ends the digest; `None` if it was known before.
    fn end(&mut self) -> Option<Digest> {
        if self.done.is_some() {
            return None;
        }
        self.done = Some(std::mem::take(&mut self.hasher).finish());
        self.done
    }
}

const LOCKED: &str = "a job does not panic while it holds its own data";

/// Runs all jobs that `finished` does not make unnecessary.
pub fn run(
    plan: &Plan,
    prepared: &Prepared,
    staging: &Staging,
    finished: Vec<Entry>,
    stop: &AtomicBool,
    progress: &dyn Progress,
) -> Result<Results, BuildError> {
    let outputs = open_outputs(plan, staging)?;
    let chains = |count: usize| (0..count).map(|_| Mutex::new(Chain::default())).collect::<Vec<_>>();
    let run = Run {
        plan,
        prepared,
        staging,
        progress,
        source_files: chains(plan.checkpoint.files().len()),
        source_tensors: chains(plan.checkpoint.tensors().len()),
        output_files: chains(outputs.len()),
        outputs,
        modules: plan.modules.iter().map(|_| Mutex::default()).collect(),
        sealed: plan.modules.iter().map(|_| Mutex::default()).collect(),
        scratch: (0..plan.threads).map(|_| Mutex::default()).collect(),
    };
    run.recall(finished);
    let resumed_modules = run.sealed.iter().filter(|sealed| sealed.lock().expect(LOCKED).is_some()).count();
    run.announce();
    let schedule = run.schedule();
    let ended = AtomicBool::new(false);
    let result = std::thread::scope(|scope| {
        let flusher = scope.spawn(|| run.flush_until(&ended));
        let raise = Raise { ended: &ended, sleeper: flusher.thread() };
        let result = schedule.run(plan.threads, stop, |thread, job| run.job(thread, job));
        drop(raise);
        result
    });
    match result {
        Ok(()) => match run.outputs.iter().find(|(path, file)| !is_same_file(file, path)) {
            Some((path, _)) => Err(BuildError::Taken { path: path.clone() }),
            None => Ok(run.results(resumed_modules)),
        },
        Err(Ended::Failed(error)) => Err(error),
        Err(Ended::Stopped) => {
            let done = run.sealed.iter().filter(|sealed| sealed.lock().expect(LOCKED).is_some()).count();
            Err(BuildError::Interrupted { done, modules: plan.modules.len() })
        }
    }
}

/// Creates the weight files at their final size, with their headers.
fn open_outputs(plan: &Plan, staging: &Staging) -> Result<Vec<(PathBuf, File)>, BuildError> {
    let mut outputs = Vec::new();
    for file in &plan.files {
        let path = staging.artifact().join(&file.name);
        if let Some(parent) = path.parent() {
            std::fs::create_dir_all(parent).map_err(|e| BuildError::io("create", parent, e))?;
        }
        // Only a file of our own is written into: a link would lead to somebody else's.
        if path.symlink_metadata().is_ok_and(|meta| !meta.is_file() || meta.nlink() != 1) {
            std::fs::remove_file(&path).map_err(|e| BuildError::io("remove", &path, e))?;
        }
        let handle = OpenOptions::new().create(true).truncate(false).read(true).write(true).open(&path);
        let handle = handle.map_err(|e| BuildError::io("create", &path, e))?;
        reserve(&handle, file.len).map_err(|e| BuildError::io("reserve space for", &path, e))?;
        handle.write_all_at(&file.header, 0).map_err(|e| BuildError::io("write", &path, e))?;
        outputs.push((path, handle));
    }
    Ok(outputs)
}

/// Claims the space now where the file system can, so that a full disk shows before hours are spent.
fn reserve(file: &File, len: u64) -> std::io::Result<()> {
    #[cfg(target_os = "linux")]
    {
        use rustix::fs::{FallocateFlags, fallocate};
        use rustix::io::Errno;
        match fallocate(file, FallocateFlags::empty(), 0, len) {
            Ok(()) | Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL) => {}
            Err(error) => return Err(error.into()),
        }
    }
    file.set_len(len)
}

impl Run<'_> {
    /// Takes over what the journal says, where it fits the plan.
    fn recall(&self, finished: Vec<Entry>) {
        for entry in finished {
            match entry {
                Entry::SourceTensor { tensor, sha256 } if tensor < self.source_tensors.len() => {
                    self.source_tensors[tensor].lock().expect(LOCKED).done = Some(sha256);
                }
                Entry::SourceFile { file, sha256 } if file < self.source_files.len() => {
                    self.source_files[file].lock().expect(LOCKED).done = Some(sha256);
                }
                Entry::Module(sealed) if sealed.module < self.sealed.len() => {
                    let module = sealed.module;
                    *self.sealed[module].lock().expect(LOCKED) = Some(sealed);
                }
                _ => {}
            }
        }
    }

    fn announce(&self) {
        let bytes = |module: &Module| module.weights() * module.work.stored.bytes();
        let mut totals = (0, 0);
        for (module, sealed) in self.plan.modules.iter().zip(&self.sealed) {
            if sealed.lock().expect(LOCKED).is_some() {
                totals = (totals.0 + bytes(module), totals.1 + 1);
            }
        }
        let all = self.plan.modules.iter().map(bytes).sum();
        self.progress.begin(all, self.plan.modules.len() as u64, totals.0, totals.1);
    }

    fn schedule(&self) -> Schedule<Job> {
        let mut schedule = Schedule::default();
        let mut of_tensor: Vec<Vec<usize>> = vec![Vec::new(); self.source_tensors.len()];
        for (index, module) in self.plan.modules.iter().enumerate() {
            of_tensor[module.tensor].push(index);
        }
        let mut seals: BTreeMap<usize, u32> = BTreeMap::new();
        let mut outputs = OutputChains::new(self.plan);
        let files = self.plan.checkpoint.files();
        let mut file_chain: Vec<Option<u32>> = vec![None; files.len()];
        for (tensor, entry) in self.plan.checkpoint.tensors().iter().enumerate() {
            let file = entry.file;
            let digest_file = self.source_files[file].lock().expect(LOCKED).done.is_none();
            let digest_tensor = self.source_tensors[tensor].lock().expect(LOCKED).done.is_none();
            if digest_file && file_chain[file].is_none() {
                let range = 0..files[file].data_start;
                file_chain[file] = Some(schedule.add(Job::Source { file, range, tensor: None }, []));
            }
            let mut panels: BTreeMap<u64, Vec<(usize, usize)>> = BTreeMap::new();
            let mut waiting: BTreeMap<usize, Vec<u32>> = BTreeMap::new();
            for index in &of_tensor[tensor] {
                if self.sealed[*index].lock().expect(LOCKED).is_some() {
                    seals.insert(*index, schedule.add(Job::Recheck { module: *index }, []));
                    continue;
                }
                let module = &self.plan.modules[*index];
                let mut progressing = self.modules[*index].lock().expect(LOCKED);
                progressing.losses = vec![Vec::new(); module.panels.len()];
                for (panel, rows) in module.panels.iter().enumerate() {
                    let start = module.source_range(rows).start;
                    panels.entry(start / PIECE).or_default().push((*index, panel));
                }
                waiting.insert(*index, Vec::new());
            }
            for piece in 0..entry.bytes().div_ceil(PIECE) {
                let start = entry.range.start + piece * PIECE;
                let range = start..(start + PIECE).min(entry.range.end);
                if digest_file || digest_tensor {
                    let job = Job::Source { file, range, tensor: Some(tensor) };
                    file_chain[file] = Some(schedule.add(job, file_chain[file]));
                }
                for (module, panel) in panels.remove(&piece).unwrap_or_default() {
                    let id = schedule.add(Job::Panel { module, panel }, []);
                    waiting.get_mut(&module).expect("only open modules have panels").push(id);
                }
            }
            for (module, panels) in waiting {
                seals.insert(module, schedule.add(Job::Seal { module }, panels));
            }
            outputs.advance(&mut schedule, &seals);
        }
        schedule
    }

    fn job(&self, thread: usize, job: &Job) -> Result<(), BuildError> {
        let mut scratch = self.scratch[thread].lock().expect(LOCKED);
        let scratch = &mut *scratch;
        match job {
            Job::Source { file, range, tensor } => self.digest_source(*file, range, *tensor)?,
            Job::Panel { module, panel } => {
                self.encode(*module, *panel, scratch)?;
                let module = &self.plan.modules[*module];
                let range = module.source_range(&module.panels[*panel]);
                self.progress.panel(range.end - range.start);
            }
            Job::Seal { module } => self.seal(*module, scratch)?,
            Job::Recheck { module } => self.recheck(*module, scratch)?,
            Job::OutputFile { file, range, last } => {
                let mut chain = self.output_files[*file].lock().expect(LOCKED);
                self.read_back(*file, range.clone(), scratch, &mut chain.hasher)?;
                if *last {
                    chain.end();
                }
            }
        }
        Ok(())
    }

    /// Feeds a piece of a source file to the digests that still want it, both in one pass where both do.
    fn digest_source(
        &self,
        file: usize,
        range: &Range<u64>,
        tensor: Option<usize>,
    ) -> Result<(), BuildError> {
        // Storage fetches the next piece while this one is digested and encoded.
        let len = self.plan.checkpoint.files()[file].len;
        self.plan.checkpoint.prefetch(file, range.end..(range.end + PIECE).min(len));
        let bytes = &self.plan.checkpoint.file_bytes(file)[range.start as usize..range.end as usize];
        let mut of_file = self.source_files[file].lock().expect(LOCKED);
        let mut of_tensor = tensor.map(|tensor| self.source_tensors[tensor].lock().expect(LOCKED));
        match of_tensor.as_deref_mut() {
            Some(tensor) if tensor.done.is_none() && of_file.done.is_none() => {
                Hasher::update_both(&mut of_file.hasher, &mut tensor.hasher, bytes);
            }
            Some(tensor) if tensor.done.is_none() => tensor.hasher.update(bytes),
            _ => of_file.hasher.update(bytes),
        }
        self.plan.checkpoint.release(file, range.clone());
        let ends_tensor = tensor.is_some_and(|t| self.plan.checkpoint.tensors()[t].range.end == range.end);
        if let (Some(tensor), Some(mut chain), true) = (tensor, of_tensor, ends_tensor)
            && let Some(sha256) = chain.end()
        {
            self.staging.record(&Entry::SourceTensor { tensor, sha256 })?;
        }
        if range.end == len
            && let Some(sha256) = of_file.end()
        {
            self.staging.record(&Entry::SourceFile { file, sha256 })?;
        }
        Ok(())
    }

    /// Encodes one panel and writes its planes.
    fn encode(&self, index: usize, panel: usize, scratch: &mut Scratch) -> Result<(), BuildError> {
        let module = &self.plan.modules[index];
        let Encoded { planes, losses, repairs } =
            encode_panel(self.plan, module, self.prepared.work(index), panel, &mut scratch.encode)?;
        for (plane, bytes) in planes.into_iter().enumerate() {
            self.write_plane(module, plane, module.panels[panel].start, bytes)?;
        }
        release_panel(self.plan, module, panel);
        let mut progressing = self.modules[index].lock().expect(LOCKED);
        progressing.losses[panel] = losses;
        progressing.repairs += repairs;
        Ok(())
    }

    fn write_plane(&self, module: &Module, plane: usize, row: u64, bytes: &[u8]) -> Result<(), BuildError> {
        let place = module.places[plane];
        let (path, file) = &self.outputs[place.file];
        let layout = &module.planes[plane];
        let offset = place.offset + layout.begun(0..row).end * layout.row_bytes();
        file.write_all_at(bytes, offset).map_err(|e| BuildError::io("write", path, e))
    }

    fn seal(&self, index: usize, scratch: &mut Scratch) -> Result<(), BuildError> {
        let module = &self.plan.modules[index];
        let Progressing { losses, repairs } = std::mem::take(&mut *self.modules[index].lock().expect(LOCKED));
        let mut loss = RowLoss::default();
        losses.into_iter().flatten().for_each(|row| loss += row);
        let sealed = SealedModule::new(index, self.plane_digests(module, scratch)?, loss, repairs);
        self.staging.record(&Entry::Module(sealed.clone()))?;
        *self.sealed[index].lock().expect(LOCKED) = Some(sealed);
        self.progress.module(&module.output.module);
        Ok(())
    }

    fn recheck(&self, index: usize, scratch: &mut Scratch) -> Result<(), BuildError> {
        let module = &self.plan.modules[index];
        let found = self.plane_digests(module, scratch)?;
        let believed = self.sealed[index].lock().expect(LOCKED).as_ref().map(|sealed| sealed.planes.clone());
        if believed == Some(found) {
            return Ok(());
        }
        // A power cut can lose bytes that a line speaks of.
        self.modules[index].lock().expect(LOCKED).losses = vec![Vec::new(); module.panels.len()];
        for panel in 0..module.panels.len() {
            self.encode(index, panel, scratch)?;
        }
        self.seal(index, scratch)
    }

    fn plane_digests(&self, module: &Module, scratch: &mut Scratch) -> Result<Vec<Digest>, BuildError> {
        let planes = module.stored.iter().zip(&module.places);
        planes
            .map(|(plane, place)| {
                let mut hasher = Hasher::default();
                self.read_back(place.file, place.offset..place.offset + plane.bytes, scratch, &mut hasher)?;
                Ok(hasher.finish())
            })
            .collect()
    }

    fn read_back(
        &self,
        file: usize,
        range: Range<u64>,
        scratch: &mut Scratch,
        hasher: &mut Hasher,
    ) -> Result<(), BuildError> {
        let (path, handle) = &self.outputs[file];
        scratch.read_back.resize(READ_BACK, 0);
        let mut at = range.start;
        while at < range.end {
            let len = (range.end - at).min(READ_BACK as u64) as usize;
            let buffer = &mut scratch.read_back[..len];
            handle.read_exact_at(buffer, at).map_err(|e| BuildError::io("read back", path, e))?;
            hasher.update(buffer);
            at += len as u64;
        }
        Ok(())
    }

    /// Starts writing dirty pages out early.
    fn flush_until(&self, ended: &AtomicBool) {
        while !ended.load(Ordering::Acquire) {
            std::thread::park_timeout(FLUSH_EVERY);
            for (_, file) in &self.outputs {
                // Publication syncs again and reports what fails.
                let _ = file.sync_data();
            }
        }
    }

    fn results(self, resumed_modules: usize) -> Results {
        let digests = |chains: Vec<Mutex<Chain>>| {
            let done = chains.into_iter().map(|chain| chain.into_inner().expect(LOCKED).done);
            done.map(|digest| digest.expect("every chain has a last job")).collect()
        };
        let sealed = self.sealed.into_iter().map(|sealed| sealed.into_inner().expect(LOCKED));
        Results {
            source_files: digests(self.source_files),
            source_tensors: digests(self.source_tensors),
            output_files: digests(self.output_files),
            modules: sealed.map(|sealed| sealed.expect("every module has a seal")).collect(),
            resumed_modules,
        }
    }
}

/// Adds the digest jobs of the artifact's files as soon as what they read will have been sealed.
struct OutputChains<'a> {
    plan: &'a Plan,
    /// Per file: planes added so far, and the last job.
    state: Vec<(usize, Option<u32>)>,
}

impl<'a> OutputChains<'a> {
    fn new(plan: &'a Plan) -> Self {
        Self { plan, state: vec![(0, None); plan.files.len()] }
    }

    fn advance(&mut self, schedule: &mut Schedule<Job>, seals: &BTreeMap<usize, u32>) {
        for (file, (next, chain)) in self.state.iter_mut().enumerate() {
            let order = &self.plan.files[file].order;
            while let Some((module, plane)) = order.get(*next)
                && let Some(seal) = seals.get(module)
            {
                let planned = &self.plan.modules[*module];
                let (place, bytes) = (planned.places[*plane], planned.stored[*plane].bytes);
                // The first piece takes the header along.
                let start = if *next == 0 { 0 } else { place.offset };
                let range = start..place.offset + bytes;
                let last = *next + 1 == order.len();
                let job = Job::OutputFile { file, range, last };
                *chain = Some(schedule.add(job, chain.iter().copied().chain([*seal])));
                *next += 1;
            }
        }
    }
}
