//! `eval.db`: every result, with all that it depends on.
//!
//! SQLite with a write-ahead log, so that a kill loses at most the row that was being written. Tables:
//!
//! ```text
//! model     one row per measured model, by digest
//! run       one row per measurement: instrument, its version, model, subject, settings, program, machine, summary
//! document  of a KL run, one row per sequence: its positions, 24 bytes each (kl::Position)
//! item      of a task or stop run, one row per item
//! ```
//!
//! A run's key is the digest of instrument, version, model, subject and settings: an unfinished run with the same
//! key is taken up where it ended. `docs/formats/eval-db.md` lists every column.

use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use rusqlite::{Connection, OpenFlags, OptionalExtension as _, Row, params};
use serde::Serialize;
use serde_json::Value;

use super::identity::Identity;
use crate::digest::{Digest, canonical_json};
use crate::failure::{Exit, Failure};
use crate::text::Moment;
use crate::tool::Tool;

/// Version of the tables.
const VERSION: i64 = 1;
/// Marks the file as ours: `tqcE`.
const APPLICATION: i64 = 0x7471_6345;

const SCHEMA: &str = "
CREATE TABLE model (
    digest TEXT PRIMARY KEY NOT NULL,
    kind TEXT NOT NULL,
    name TEXT NOT NULL,
    bytes INTEGER NOT NULL,
    bits_per_weight REAL NOT NULL,
    identity TEXT NOT NULL
) STRICT;
CREATE TABLE run (
    id INTEGER PRIMARY KEY,
    key TEXT NOT NULL,
    instrument TEXT NOT NULL,
    version INTEGER NOT NULL,
    model TEXT NOT NULL REFERENCES model (digest),
    subject TEXT NOT NULL,
    settings TEXT NOT NULL,
    tool TEXT NOT NULL,
    machine TEXT NOT NULL,
    started TEXT NOT NULL,
    finished TEXT,
    seconds REAL NOT NULL DEFAULT 0,
    summary TEXT
) STRICT;
CREATE INDEX run_by_key ON run (key);
CREATE TABLE document (
    run INTEGER NOT NULL REFERENCES run (id) ON DELETE CASCADE,
    sequence INTEGER NOT NULL,
    document INTEGER NOT NULL,
    tokens INTEGER NOT NULL,
    positions BLOB NOT NULL,
    PRIMARY KEY (run, sequence)
) STRICT, WITHOUT ROWID;
CREATE TABLE item (
    run INTEGER NOT NULL REFERENCES run (id) ON DELETE CASCADE,
    suite TEXT NOT NULL,
    frame TEXT NOT NULL,
    item TEXT NOT NULL,
    correct INTEGER,
    detail TEXT NOT NULL,
    PRIMARY KEY (run, suite, frame, item)
) STRICT, WITHOUT ROWID;
";

/// Why a result could not be kept or found.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum DbError {
    #[error("there is no `{path}`")]
    Missing { path: PathBuf },
    #[error("`{path}` is not a database of results")]
    NotOurs { path: PathBuf },
    #[error("`{path}` has version {found}, but this program reads version {VERSION}")]
    Version { path: PathBuf, found: i64 },
    #[error("`{path}`: {source}")]
    Sqlite { path: PathBuf, source: rusqlite::Error },
    #[error("`{path}`: row of run {run} is damaged: {problem}")]
    Damaged { path: PathBuf, run: i64, problem: String },
    #[error("`{path}` has no run {run}")]
    NoRun { path: PathBuf, run: i64 },
}

impl Failure for DbError {
    fn exit(&self) -> Exit {
        match self {
            DbError::Missing { .. } | DbError::NotOurs { .. } | DbError::NoRun { .. } => Exit::Request,
            DbError::Version { .. } | DbError::Damaged { .. } => Exit::Input,
            DbError::Sqlite { source, .. }
                if source.sqlite_error_code() == Some(rusqlite::ErrorCode::DatabaseCorrupt) =>
            {
                Exit::Input
            }
            DbError::Sqlite { .. } => Exit::Machine,
        }
    }

    fn help(&self) -> Option<String> {
        let text = match self {
            DbError::Missing { .. } => "`tqc eval kl`, `tasks` and `stop` write it; name it with `--db FILE`",
            DbError::NotOurs { .. } => "name another file with `--db FILE`",
            DbError::Version { .. } => {
                "use the program version that wrote it, or name a new file with `--db FILE`"
            }
            DbError::Sqlite { .. } => "check the disk, and that no other program holds the file",
            DbError::Damaged { .. } => "measure again into a new file",
            DbError::NoRun { .. } => "`tqc eval list` shows the runs",
        };
        Some(text.to_owned())
    }
}

/// An open database.
#[derive(Debug)]
pub struct Db {
    path: PathBuf,
    connection: Connection,
}

/// What a measurement depends on.
#[derive(Debug, Clone, Serialize)]
pub struct Key {
    /// `kl`, `tasks`, `stop` or `layers`.
    pub instrument: &'static str,
    /// Version of the instrument: raised when the same inputs may give other numbers.
    pub version: u32,
    /// The model's digest.
    pub model: Digest,
    /// Digests of what it was measured on.
    pub subject: Value,
    /// Settings that change the result.
    pub settings: Value,
}

/// A run that rows are added to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Open {
    /// Its number.
    pub id: i64,
    /// Whether an earlier process began it.
    pub resumed: bool,
}

/// A run as it is listed.
#[derive(Debug, Clone, Serialize)]
pub struct Run {
    /// Its number.
    pub id: i64,
    /// Digest of all that the result depends on but the program.
    pub key: Digest,
    /// See [`Key::instrument`].
    pub instrument: String,
    /// See [`Key::version`].
    pub version: u32,
    /// The model.
    pub model: Identity,
    /// See [`Key::subject`].
    pub subject: Value,
    /// See [`Key::settings`].
    pub settings: Value,
    /// Name, version and source digest of the program.
    pub tool: Value,
    /// The machine.
    pub machine: Value,
    /// When it began, UTC.
    pub started: String,
    /// When it ended; null if it did not.
    pub finished: Option<String>,
    /// Time spent, over all processes.
    pub seconds: f64,
    /// The result; null if it did not end.
    pub summary: Value,
}

/// An item's result.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Item {
    /// Its suite.
    pub suite: String,
    /// `choice`, `raw` or `chat`, or the probe's part.
    pub frame: String,
    /// Its id in the suite.
    pub item: String,
    /// Whether it was right, where that has a meaning.
    pub correct: Option<bool>,
    /// Everything else.
    pub detail: Value,
}

/// The positions of a sequence.
#[derive(Debug, Clone, PartialEq)]
pub struct Document {
    /// Number of the sequence in the dump.
    pub sequence: usize,
    /// Number of its document.
    pub document: usize,
    /// Its positions.
    pub positions: Vec<super::kl::Position>,
}

impl Db {
    /// Opens the database at `path`, or makes it.
    ///
    /// # Errors
    /// [`DbError::NotOurs`], [`DbError::Version`], [`DbError::Sqlite`].
    pub fn create(path: &Path) -> Result<Self, DbError> {
        if path.is_dir() {
            return Err(DbError::NotOurs { path: path.to_owned() });
        }
        let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_CREATE;
        let db = Self::checked(path, Connection::open_with_flags(plain(path), flags))?;
        db.with(|c| c.pragma_update(None, "journal_mode", "WAL"))?;
        // Of the write-ahead log, a power cut may take the last rows; they are measured again.
        db.with(|c| c.pragma_update(None, "synchronous", "NORMAL"))?;
        db.with(|c| c.pragma_update(None, "foreign_keys", true))?;
        Ok(db)
    }

    /// Opens the database at `path` for reading.
    ///
    /// # Errors
    /// [`DbError::Missing`], and those of [`Db::create`].
    pub fn open(path: &Path) -> Result<Self, DbError> {
        if !path.is_file() {
            return Err(DbError::Missing { path: path.to_owned() });
        }
        // Read-only connections cannot recover a log that a killed process left; in a place that cannot be written,
        // nobody writes one.
        let flags = OpenFlags::SQLITE_OPEN_READ_WRITE;
        match Self::checked(path, Connection::open_with_flags(plain(path), flags)) {
            Err(DbError::Sqlite { source, .. })
                if matches!(
                    source.sqlite_error_code(),
                    Some(rusqlite::ErrorCode::CannotOpen | rusqlite::ErrorCode::ReadOnly)
                ) =>
            {
                let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_URI;
                Self::checked(path, Connection::open_with_flags(immutable(path), flags))
            }
            opened => opened,
        }
    }

    fn checked(path: &Path, connection: rusqlite::Result<Connection>) -> Result<Self, DbError> {
        let sqlite = |source| DbError::Sqlite { path: path.to_owned(), source };
        let db = Self { path: path.to_owned(), connection: connection.map_err(sqlite)? };
        db.with(|c| c.busy_timeout(Duration::from_secs(30)))?;
        let pragma = |name: &str| db.connection.pragma_query_value(None, name, |row| row.get::<_, i64>(0));
        let application = pragma("application_id").map_err(|error| match error.sqlite_error_code() {
            Some(rusqlite::ErrorCode::NotADatabase) => DbError::NotOurs { path: path.to_owned() },
            _ => sqlite(error),
        })?;
        let tables: i64 =
            db.with(|c| c.query_row("SELECT count(*) FROM sqlite_schema", [], |row| row.get(0)))?;
        if application == 0 && tables == 0 {
            db.with(|c| {
                c.execute_batch(&format!(
                    "BEGIN IMMEDIATE; {SCHEMA} PRAGMA application_id = {APPLICATION}; \
                     PRAGMA user_version = {VERSION}; COMMIT;"
                ))
            })?;
        } else if application != APPLICATION {
            return Err(DbError::NotOurs { path: path.to_owned() });
        }
        match db.with(|c| c.pragma_query_value(None, "user_version", |row| row.get(0)))? {
            VERSION => Ok(db),
            found => Err(DbError::Version { path: path.to_owned(), found }),
        }
    }

    fn with<T>(&self, act: impl FnOnce(&Connection) -> rusqlite::Result<T>) -> Result<T, DbError> {
        act(&self.connection).map_err(|source| DbError::Sqlite { path: self.path.clone(), source })
    }

    /// Begins a run, or takes up the unfinished one with the same key. With `fresh` an unfinished one is dropped.
    ///
    /// # Errors
    /// [`DbError::Sqlite`].
    pub fn begin(&self, key: &Key, model: &Identity, fresh: bool) -> Result<Open, DbError> {
        let text = |value: &Value| value.to_string();
        let identity = serde_json::to_value(model).expect("an identity is plain data");
        self.with(|c| {
            c.execute(
                "INSERT INTO model VALUES (?1, ?2, ?3, ?4, ?5, ?6) ON CONFLICT (digest) DO UPDATE SET \
                 name = excluded.name, identity = excluded.identity",
                params![
                    model.digest.to_string(),
                    model.kind,
                    model.name,
                    model.bytes.cast_signed(),
                    model.bits_per_weight,
                    text(&identity)
                ],
            )
        })?;
        let digest = Digest::of(&canonical_json(key)).to_string();
        if fresh {
            self.with(|c| c.execute("DELETE FROM run WHERE key = ?1 AND finished IS NULL", params![digest]))?;
        }
        let unfinished = "SELECT id FROM run WHERE key = ?1 AND finished IS NULL ORDER BY id DESC LIMIT 1";
        let found = self.with(|c| c.query_row(unfinished, params![digest], |row| row.get(0)).optional())?;
        if let Some(id) = found {
            return Ok(Open { id, resumed: true });
        }
        let tool = serde_json::to_value(Tool::this()).expect("the tool's record is plain data");
        self.with(|c| {
            c.execute(
                "INSERT INTO run (key, instrument, version, model, subject, settings, tool, machine, started) \
                 VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9)",
                params![
                    digest,
                    key.instrument,
                    key.version,
                    key.model.to_string(),
                    text(&key.subject),
                    text(&key.settings),
                    text(&tool),
                    text(&super::machine()),
                    now()
                ],
            )?;
            Ok(Open { id: c.last_insert_rowid(), resumed: false })
        })
    }

    /// Keeps the positions of a sequence.
    ///
    /// # Errors
    /// [`DbError::Sqlite`].
    pub fn put_document(&self, run: i64, document: &Document) -> Result<(), DbError> {
        let bytes: Vec<u8> = document.positions.iter().flat_map(|position| position.to_bytes()).collect();
        self.with(|c| {
            c.prepare_cached("INSERT OR REPLACE INTO document VALUES (?1, ?2, ?3, ?4, ?5)")?.execute(params![
                run,
                document.sequence,
                document.document,
                document.positions.len(),
                bytes
            ])
        })?;
        Ok(())
    }

    /// Keeps an item's result.
    ///
    /// # Errors
    /// [`DbError::Sqlite`].
    pub fn put_item(&self, run: i64, item: &Item) -> Result<(), DbError> {
        self.with(|c| {
            c.prepare_cached("INSERT OR REPLACE INTO item VALUES (?1, ?2, ?3, ?4, ?5, ?6)")?.execute(params![
                run,
                item.suite,
                item.frame,
                item.item,
                item.correct,
                item.detail.to_string()
            ])
        })?;
        Ok(())
    }

    /// Drops an unfinished run that has no rows; whether it did.
    ///
    /// # Errors
    /// [`DbError::Sqlite`].
    pub fn drop_empty(&self, run: i64) -> Result<bool, DbError> {
        let sql = "DELETE FROM run WHERE id = ?1 AND finished IS NULL \
                   AND NOT EXISTS (SELECT 1 FROM document WHERE run = ?1) \
                   AND NOT EXISTS (SELECT 1 FROM item WHERE run = ?1)";
        Ok(self.with(|c| c.execute(sql, params![run]))? > 0)
    }

    /// Adds time spent to a run that is not finished yet.
    ///
    /// # Errors
    /// [`DbError::Sqlite`].
    pub fn spend(&self, run: i64, seconds: f64) -> Result<(), DbError> {
        self.with(|c| {
            c.execute("UPDATE run SET seconds = seconds + ?2 WHERE id = ?1", params![run, seconds])
        })?;
        Ok(())
    }

    /// Ends a run.
    ///
    /// # Errors
    /// [`DbError::Sqlite`].
    pub fn finish(&self, run: i64, summary: &Value, seconds: f64) -> Result<(), DbError> {
        self.with(|c| {
            c.execute(
                "UPDATE run SET finished = ?2, summary = ?3, seconds = seconds + ?4 WHERE id = ?1",
                params![run, now(), summary.to_string(), seconds],
            )
        })?;
        Ok(())
    }

    /// All runs, the oldest first.
    ///
    /// # Errors
    /// [`DbError::Sqlite`], [`DbError::Damaged`].
    pub fn runs(&self) -> Result<Vec<Run>, DbError> {
        self.select("", &[])
    }

    /// One run.
    ///
    /// # Errors
    /// [`DbError::NoRun`], [`DbError::Sqlite`], [`DbError::Damaged`].
    pub fn run(&self, id: i64) -> Result<Run, DbError> {
        let found = self.select("WHERE run.id = ?1", &[&id])?;
        found.into_iter().next().ok_or_else(|| DbError::NoRun { path: self.path.clone(), run: id })
    }

    fn select(&self, filter: &str, values: &[&dyn rusqlite::ToSql]) -> Result<Vec<Run>, DbError> {
        let sql = format!(
            "SELECT run.id, run.key, instrument, version, identity, subject, settings, tool, machine, started, \
             finished, seconds, summary FROM run JOIN model ON model.digest = run.model {filter} ORDER BY run.id"
        );
        let rows = self.with(|c| {
            let mut statement = c.prepare(&sql)?;
            let rows = statement.query_map(values, |row| Ok(raw(row)))?;
            rows.collect::<Result<Vec<_>, _>>()
        })?;
        let damaged = |(run, problem)| DbError::Damaged { path: self.path.clone(), run, problem };
        rows.into_iter().map(|row| row.map_err(damaged)).collect()
    }

    /// The sequences of a run, in order.
    ///
    /// # Errors
    /// [`DbError::Sqlite`], [`DbError::Damaged`].
    pub fn documents(&self, run: i64) -> Result<Vec<Document>, DbError> {
        let sql = "SELECT sequence, document, positions FROM document WHERE run = ?1 ORDER BY sequence";
        let rows: Vec<(usize, usize, Vec<u8>)> = self.with(|c| {
            let mut statement = c.prepare(sql)?;
            let rows =
                statement.query_map(params![run], |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?)))?;
            rows.collect()
        })?;
        let document = |(sequence, document, bytes): (usize, usize, Vec<u8>)| match bytes.as_chunks::<24>() {
            (whole, []) => {
                let positions = whole.iter().map(super::kl::Position::from_bytes).collect();
                Ok(Document { sequence, document, positions })
            }
            _ => {
                let problem = format!("sequence {sequence} has {} bytes of positions", bytes.len());
                Err(DbError::Damaged { path: self.path.clone(), run, problem })
            }
        };
        rows.into_iter().map(document).collect()
    }

    /// The items of a run, by suite, frame and id.
    ///
    /// # Errors
    /// [`DbError::Sqlite`], [`DbError::Damaged`].
    pub fn items(&self, run: i64) -> Result<Vec<Item>, DbError> {
        let sql = "SELECT suite, frame, item, correct, detail FROM item WHERE run = ?1 \
                   ORDER BY suite, frame, item";
        let rows: Vec<(Item, String)> = self.with(|c| {
            let mut statement = c.prepare(sql)?;
            let rows = statement.query_map(params![run], |row| {
                let (suite, frame, item) = (row.get(0)?, row.get(1)?, row.get(2)?);
                Ok((Item { suite, frame, item, correct: row.get(3)?, detail: Value::Null }, row.get(4)?))
            })?;
            rows.collect()
        })?;
        let item = |(item, detail): (Item, String)| match serde_json::from_str(&detail) {
            Ok(detail) => Ok(Item { detail, ..item }),
            Err(error) => {
                let problem = format!("item `{}`: {error}", item.item);
                Err(DbError::Damaged { path: self.path.clone(), run, problem })
            }
        };
        rows.into_iter().map(item).collect()
    }
}

/// `path` so that SQLite sees a file in it, whatever its name: `:memory:` is one, too.
fn plain(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned())
}

/// The URI of a file that nobody writes.
fn immutable(path: &Path) -> String {
    let mut uri = "file:".to_owned();
    for byte in plain(path).as_os_str().as_encoded_bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'/' | b'.' | b'-' | b'_' => {
                uri.push(char::from(*byte))
            }
            _ => uri.push_str(&format!("%{byte:02x}")),
        }
    }
    uri.push_str("?immutable=1");
    uri
}

/// A row of `run` with its model, or its number and what is wrong with it.
fn raw(row: &Row<'_>) -> Result<Run, (i64, String)> {
    let id: i64 = row.get(0).map_err(|error| (0, error.to_string()))?;
    let read = || -> Result<Run, Box<dyn std::error::Error>> {
        let json = |column: usize| -> Result<Value, Box<dyn std::error::Error>> {
            let text: Option<String> = row.get(column)?;
            Ok(text.map_or(Ok(Value::Null), |text| serde_json::from_str(&text))?)
        };
        Ok(Run {
            id,
            key: Digest::from_str(&row.get::<_, String>(1)?)?,
            instrument: row.get(2)?,
            version: row.get(3)?,
            model: serde_json::from_value(json(4)?)?,
            subject: json(5)?,
            settings: json(6)?,
            tool: json(7)?,
            machine: json(8)?,
            started: row.get(9)?,
            finished: row.get(10)?,
            seconds: row.get(11)?,
            summary: json(12)?,
        })
    };
    read().map_err(|error| (id, error.to_string()))
}

/// UTC, to the second.
fn now() -> String {
    Moment::now().strftime("%Y-%m-%dT%H:%M:%SZ").expect("the format has only known directives")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::eval::kl::Position;
    use serde_json::json;

    fn identity(name: &str) -> Identity {
        Identity {
            digest: Digest::of(name.as_bytes()),
            kind: "checkpoint".to_owned(),
            name: name.to_owned(),
            model_type: None,
            record: Value::Null,
            tokenizer: None,
            weights: 8,
            bytes: 16,
            bits_per_weight: 16.0,
            classes: Vec::new(),
        }
    }

    fn key(model: &Identity, seed: u32) -> Key {
        let settings = json!({ "seed": seed });
        Key { instrument: "kl", version: 1, model: model.digest, subject: json!({ "dump": "d" }), settings }
    }

    #[test]
    fn rows_come_back_as_they_were_and_an_unfinished_run_is_taken_up() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("eval.db");
        let model = identity("a");
        let position = Position { kl: 0.25, confidence: 0.5, ..Position::NOT_FINITE };
        let document = Document { sequence: 3, document: 2, positions: vec![position; 4] };
        let item = Item {
            suite: "s".to_owned(),
            frame: "raw".to_owned(),
            item: "7".to_owned(),
            correct: Some(true),
            detail: json!({ "text": "é" }),
        };
        let first = {
            let db = Db::create(&path).unwrap();
            let open = db.begin(&key(&model, 1), &model, false).unwrap();
            assert!(!open.resumed);
            db.put_document(open.id, &document).unwrap();
            db.put_item(open.id, &item).unwrap();
            open.id
        };
        let db = Db::create(&path).unwrap();
        assert_eq!(db.begin(&key(&model, 1), &model, false).unwrap(), Open { id: first, resumed: true });
        assert!(!db.begin(&key(&model, 2), &model, false).unwrap().resumed, "other settings, another run");
        let back = db.documents(first).unwrap();
        assert_eq!((back[0].sequence, back[0].document, back[0].positions.len()), (3, 2, 4));
        assert_eq!(back[0].positions[0].to_bytes(), position.to_bytes());
        assert_eq!(db.items(first).unwrap(), [item]);
        db.finish(first, &json!({ "mean_kl": 0.5 }), 2.0).unwrap();
        let run = db.run(first).unwrap();
        assert_eq!((run.summary, run.model, run.seconds), (json!({ "mean_kl": 0.5 }), model.clone(), 2.0));
        assert!(!db.begin(&key(&model, 1), &model, false).unwrap().resumed, "a finished run is not taken up");
        assert_eq!(db.runs().unwrap().len(), 3);
        assert!(matches!(db.run(99), Err(DbError::NoRun { run: 99, .. })));
    }

    #[test]
    fn files_that_are_not_ours_are_refused_and_left_as_they_are() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("other.db");
        assert!(matches!(Db::open(&path), Err(DbError::Missing { .. })));
        std::fs::write(&path, b"not a database at all, but long enough to look at").unwrap();
        assert!(matches!(Db::create(&path), Err(DbError::NotOurs { .. })));
        assert!(std::fs::read(&path).unwrap().starts_with(b"not a database"));
        let foreign = dir.path().join("foreign.db");
        Connection::open(&foreign).unwrap().execute_batch("CREATE TABLE t (x)").unwrap();
        assert!(matches!(Db::create(&foreign), Err(DbError::NotOurs { .. })));
        let newer = dir.path().join("newer.db");
        Db::create(&newer).unwrap().connection.pragma_update(None, "user_version", 2).unwrap();
        assert!(matches!(Db::open(&newer), Err(DbError::Version { found: 2, .. })));
    }
}
