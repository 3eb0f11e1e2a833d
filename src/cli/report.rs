//! `tqc report`.

use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use clap::Args;
use serde::Serialize;

use super::Common;
use super::print;
use crate::eval::db::Db;
use crate::failure::{Exit, Failure, Outcome};
use crate::report::{collect, is_page, page};
use crate::units::Bytes;

/// Make one page of all results in the database.
///
/// A single HTML file with tables and charts, for a browser without network: sizes and divergences, tasks, stop
/// probes, what the bytes are spent on, and where every number is from.
#[derive(Debug, Args)]
pub struct ReportArgs {
    /// The database of results.
    #[arg(long, value_name = "FILE", default_value = "eval.db")]
    db: PathBuf,
    /// The page.
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
    /// Write over a file that is no page of ours.
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    common: Common,
}

/// What is printed.
#[derive(Serialize)]
struct Written {
    path: String,
    bytes: u64,
    models: usize,
    runs: usize,
}

/// Why there is no page.
#[derive(Debug, thiserror::Error)]
enum ReportError {
    #[error("`{db}` holds no results")]
    Empty { db: PathBuf },
    #[error("`{path}` is there already, and is not a page that `tqc report` made")]
    Occupied { path: PathBuf },
    #[error("`{path}` is the database that the page is made of")]
    IsDb { path: PathBuf },
    #[error("`{path}` cannot be read: {error}")]
    Read { path: PathBuf, error: io::Error },
    #[error("`{path}` cannot be written: {error}")]
    Write { path: PathBuf, error: io::Error },
}

impl Failure for ReportError {
    fn exit(&self) -> Exit {
        match self {
            ReportError::Empty { .. } | ReportError::Occupied { .. } | ReportError::IsDb { .. } => {
                Exit::Request
            }
            ReportError::Read { .. } | ReportError::Write { .. } => Exit::Machine,
        }
    }

    fn help(&self) -> Option<String> {
        let text = match self {
            ReportError::Empty { .. } => {
                "measure something first: `tqc eval kl`, `tasks` and `stop` write into it; or name another file \
                 with `--db FILE`"
            }
            ReportError::IsDb { .. } => "name another file with `-o FILE`",
            ReportError::Occupied { .. } => "name another file with `-o FILE`, or replace it with `--force`",
            ReportError::Read { .. } | ReportError::Write { .. } => "check the path and its permissions",
        };
        Some(text.to_owned())
    }
}

impl ReportArgs {
    pub fn run(self) -> Outcome<Exit> {
        if matches!((self.db.canonicalize(), self.output.canonicalize()), (Ok(db), Ok(page)) if db == page) {
            return Err(ReportError::IsDb { path: self.output }.into());
        }
        if !self.force {
            check_place(&self.output)?;
        }
        let data = collect(&Db::open(&self.db)?)?;
        if data.runs.is_empty() {
            return Err(ReportError::Empty { db: self.db }.into());
        }
        let html = page(&data);
        write_whole(&self.output, &html)?;
        let written = Written {
            path: self.output.display().to_string(),
            bytes: html.len() as u64,
            models: data.models.len(),
            runs: data.runs.len(),
        };
        print::result(self.common.json, &written, |written| {
            format!(
                "{}: {}, {} models, {} runs\n",
                written.path,
                Bytes(written.bytes),
                written.models,
                written.runs
            )
        })?;
        Ok(Exit::Done)
    }
}

/// Refuses a place where something lies that this command did not make.
fn check_place(path: &Path) -> Result<(), ReportError> {
    let read = |error| ReportError::Read { path: path.to_owned(), error };
    match path.symlink_metadata() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(read(error)),
        Ok(found) if !found.is_file() => return Err(ReportError::Occupied { path: path.to_owned() }),
        Ok(_) => {}
    }
    let mut start = Vec::new();
    std::fs::File::open(path).and_then(|file| file.take(1024).read_to_end(&mut start)).map_err(read)?;
    match is_page(&start) {
        true => Ok(()),
        false => Err(ReportError::Occupied { path: path.to_owned() }),
    }
}

/// Beside, then over: the page appears whole or not at all.
fn write_whole(path: &Path, html: &str) -> Result<(), ReportError> {
    let failed = |error| ReportError::Write { path: path.to_owned(), error };
    let name = path.file_name().ok_or_else(|| failed(io::ErrorKind::InvalidFilename.into()))?;
    let beside = path.with_file_name(format!(".{}.new", name.to_string_lossy()));
    std::fs::write(&beside, html).and_then(|()| std::fs::rename(&beside, path)).map_err(|error| {
        let _ = std::fs::remove_file(&beside);
        failed(error)
    })
}
