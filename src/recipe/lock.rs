//! The lock of a recipe: what went into an artifact, and which artifact came out.
//!
//! A lock is TOML text with one spelling, so that a version-control diff shows what changed and
//! nothing else. Writing it is the command's work; this module reads, formats and compares.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use serde::Deserialize;
use toml::Spanned;

use super::text::Located;
use crate::digest::{BadDigest, Digest};
use crate::failure::{Exit, Failure};

const VERSION: i64 = 1;

const HEADER: &str = "\
# Lock of a tqc recipe: what its artifact was made from, and the artifact's digest.
# `tqc build RECIPE --write-lock` writes this file; `tqc build RECIPE --locked` fails if anything differs.
# Commit it beside the recipe, and do not edit it.
";

/// What one build read and wrote.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lock {
    /// Name and version of the tool, as `tqc --version` prints them.
    pub tool: String,
    /// The digest of the tool's own source.
    pub tool_digest: Digest,
    /// [`super::Recipe::digest`].
    pub recipe: Digest,
    /// The digest of every file that is read of the checkpoint, but the tokenizer's.
    pub source: Digest,
    /// The digest of the tokenizer's files; `None` if the checkpoint has none.
    pub tokenizer: Option<Digest>,
    /// The digest of the tokens that bases were measured on, and of the files that a calibration and a budget read; `None`
    /// without any.
    pub text: Option<Digest>,
    /// The digest of the artifact.
    pub artifact: Digest,
}

/// Why a lock cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum LockError {
    /// No such file.
    #[error("lock `{path}` does not exist", path = path.display())]
    Absent {
        /// The path asked for.
        path: PathBuf,
    },
    /// The operating system refused, or the file is not text.
    #[error("lock `{path}` cannot be read: {error}", path = path.display())]
    Unreadable {
        /// The path asked for.
        path: PathBuf,
        /// Its words.
        error: std::io::Error,
    },
    /// Something in its text is wrong.
    #[error(transparent)]
    Text(#[from] Box<Located<LockMistake>>),
}

impl Failure for LockError {
    fn exit(&self) -> Exit {
        Exit::Request
    }

    fn help(&self) -> Option<String> {
        match self {
            LockError::Absent { .. } | LockError::Text(_) => {
                Some("`tqc build RECIPE --write-lock` writes a new one".into())
            }
            LockError::Unreadable { .. } => None,
        }
    }
}

/// What is wrong at a place in a lock's text.
#[derive(Debug, thiserror::Error)]
pub enum LockMistake {
    /// Not TOML, or not with the keys and types of a lock.
    #[error("this is not a lock: {message}")]
    Form {
        /// The TOML reader's words.
        message: String,
    },
    /// Written by a version of the tool that this one does not know.
    #[error("a lock of version {found} cannot be read; this tool knows version {VERSION}")]
    Version {
        /// As written.
        found: i64,
    },
    /// Not a digest.
    #[error("`{key}`: {error}")]
    Digest {
        /// The key.
        key: &'static str,
        /// What is wrong with its value.
        error: BadDigest,
    },
}

#[derive(Deserialize)]
struct Header {
    version: Option<Spanned<i64>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct Fields {
    #[serde(rename = "version")]
    _version: i64,
    tool: String,
    tool_digest: Spanned<String>,
    recipe: Spanned<String>,
    source: Spanned<String>,
    tokenizer: Option<Spanned<String>>,
    text: Option<Spanned<String>>,
    artifact: Spanned<String>,
}

impl Lock {
    /// Reads a lock file.
    ///
    /// # Errors
    /// [`LockError`].
    pub fn read(path: &Path) -> Result<Self, LockError> {
        let text = std::fs::read_to_string(path).map_err(|error| match error.kind() {
            std::io::ErrorKind::NotFound => LockError::Absent { path: path.to_owned() },
            _ => LockError::Unreadable { path: path.to_owned(), error },
        })?;
        Self::parse(path, &text)
    }

    /// Whether a file's text is a lock's, whole or damaged: it may be written over.
    pub fn is_lock(text: &str) -> bool {
        text.starts_with(HEADER)
    }

    /// Reads the text of a lock; `path` is what messages call it.
    ///
    /// # Errors
    /// [`LockError::Text`].
    pub fn parse(path: &Path, text: &str) -> Result<Self, LockError> {
        let wrong = |at: std::ops::Range<usize>, mistake| {
            LockError::from(Box::new(Located::new(path, text, at, mistake)))
        };
        let form = |error: toml::de::Error| {
            let message = error.message().lines().collect::<Vec<_>>().join(", ");
            wrong(error.span().unwrap_or(0..0), LockMistake::Form { message })
        };
        // The version first: the keys of another version are not mistakes.
        let header: Header = toml::from_str(text).map_err(form)?;
        if let Some(version) = header.version
            && *version.get_ref() != VERSION
        {
            return Err(wrong(version.span(), LockMistake::Version { found: version.into_inner() }));
        }
        let fields: Fields = toml::from_str(text).map_err(form)?;
        let digest = |key: &'static str, value: &Spanned<String>| {
            Digest::from_str(value.get_ref())
                .map_err(|error| wrong(value.span(), LockMistake::Digest { key, error }))
        };
        Ok(Self {
            tool_digest: digest("tool-digest", &fields.tool_digest)?,
            recipe: digest("recipe", &fields.recipe)?,
            source: digest("source", &fields.source)?,
            tokenizer: fields.tokenizer.as_ref().map(|value| digest("tokenizer", value)).transpose()?,
            text: fields.text.as_ref().map(|value| digest("text", value)).transpose()?,
            artifact: digest("artifact", &fields.artifact)?,
            tool: fields.tool,
        })
    }

    /// The text of the lock file: equal locks have equal text.
    pub fn text(&self) -> String {
        let mut text = format!("{HEADER}version = {VERSION}\n");
        for (key, value) in self.rows() {
            if let Some(value) = value {
                text.push_str(&format!("{key} = {}\n", toml::Value::String(value)));
            }
        }
        text
    }

    /// What differs between this lock and what a build `found`, in the order of the file.
    pub fn differences(&self, found: &Lock) -> Vec<Difference> {
        self.rows()
            .into_iter()
            .zip(found.rows())
            .filter(|((_, locked), (_, found))| locked != found)
            .map(|((what, locked), (_, found))| Difference { what, locked, found })
            .collect()
    }

    fn rows(&self) -> [(&'static str, Option<String>); 7] {
        [
            ("tool", Some(self.tool.clone())),
            ("tool-digest", Some(self.tool_digest.to_string())),
            ("recipe", Some(self.recipe.to_string())),
            ("source", Some(self.source.to_string())),
            ("tokenizer", self.tokenizer.map(|digest| digest.to_string())),
            ("text", self.text.map(|digest| digest.to_string())),
            ("artifact", Some(self.artifact.to_string())),
        ]
    }
}

/// One entry of a lock that is not what a build found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Difference {
    /// The key in the lock file.
    pub what: &'static str,
    /// What the lock says; `None` if it has no such entry.
    pub locked: Option<String>,
    /// What was found; `None` if there is no such thing.
    pub found: Option<String>,
}

impl fmt::Display for Difference {
    /// Two lines, as `diff` prints them.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let say = |value: &Option<String>| value.clone().unwrap_or_else(|| "(none)".to_owned());
        write!(f, "- {:<11} {}\n+ {:<11} {}", self.what, say(&self.locked), self.what, say(&self.found))
    }
}

/// All differences, and the one sentence that they amount to; `built` says whether an artifact was built.
pub fn differences_text(differences: &[Difference], built: bool) -> String {
    let mut text = String::from("--- lock\n+++ found\n");
    for difference in differences {
        text.push_str(&format!("{difference}\n"));
    }
    let changed = |what: &str| differences.iter().any(|difference| difference.what == what);
    let inputs: Vec<&str> = [
        (changed("tool") || changed("tool-digest"), "the tool"),
        (changed("recipe"), "the recipe"),
        (changed("source"), "the source"),
        (changed("tokenizer"), "the tokenizer"),
        (changed("text"), "the text that was measured on"),
    ]
    .into_iter()
    .filter_map(|(changed, what)| changed.then_some(what))
    .collect();
    let artifact = changed("artifact");
    text.push_str(&match (inputs.as_slice(), artifact) {
        ([], false) => "nothing differs\n".to_owned(),
        ([], true) => "every input is the same and the artifact is not: please report this\n".to_owned(),
        ([first @ .., last], artifact) => {
            let who = if first.is_empty() {
                (*last).to_owned()
            } else {
                format!("{} and {last}", first.join(", "))
            };
            let what = match (built, artifact) {
                (false, _) => "nothing was built",
                (true, true) => "so did the artifact",
                (true, false) => "the artifact did not",
            };
            format!("{who} changed; {what}\n")
        }
    });
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn digest(digit: char) -> Digest {
        digit.to_string().repeat(64).parse().unwrap()
    }

    fn lock() -> Lock {
        Lock {
            tool: "tqc 0.1.0".into(),
            tool_digest: digest('1'),
            recipe: digest('2'),
            source: digest('3'),
            tokenizer: Some(digest('4')),
            text: None,
            artifact: digest('5'),
        }
    }

    fn refusal(text: &str) -> String {
        Lock::parse(Path::new("x.lock"), text).unwrap_err().to_string()
    }

    #[test]
    fn the_text_is_exactly_this() {
        let expected = format!(
            "{HEADER}version = 1\ntool = \"tqc 0.1.0\"\ntool-digest = \"{}\"\nrecipe = \"{}\"\nsource = \"{}\"\n\
             tokenizer = \"{}\"\nartifact = \"{}\"\n",
            "1".repeat(64),
            "2".repeat(64),
            "3".repeat(64),
            "4".repeat(64),
            "5".repeat(64)
        );
        assert_eq!(lock().text(), expected);
    }

    #[test]
    fn a_lock_reads_back_as_it_was_written() {
        let odd = Lock { tool: "a \"quoted\"\\ tool\n".into(), tokenizer: None, ..lock() };
        for lock in [lock(), odd] {
            assert_eq!(Lock::parse(Path::new("x.lock"), &lock.text()).unwrap(), lock);
        }
    }

    #[test]
    fn a_later_version_is_named_before_its_keys_are_judged() {
        let text = format!("version = 2\nshape = \"round\"\n{}", lock().text().replace("version = 1\n", ""));
        assert_eq!(
            refusal(&text),
            "x.lock:1:11\n1 | version = 2\n  |           ^\na lock of version 2 cannot be read; this tool knows version 1"
        );
    }

    #[test]
    fn refuses_an_unknown_key_a_bad_digest_and_an_absent_key() {
        let unknown = refusal(&format!("{}colour = \"red\"\n", lock().text()));
        assert!(unknown.starts_with("x.lock:11:1\n11 | colour"), "{unknown}");
        assert!(unknown.contains("unknown field `colour`"), "{unknown}");
        let short = refusal(&lock().text().replace(&"5".repeat(64), "55"));
        assert_eq!(
            short,
            "x.lock:10:12\n10 | artifact = \"55\"\n   |            ^^^^\n\
             `artifact`: a SHA-256 digest is 64 hexadecimal digits, got `55`"
        );
        let absent = refusal(&lock().text().replace("version = 1\n", ""));
        assert!(absent.contains("missing field `version`"), "{absent}");
        assert!(refusal("version = ").contains("x.lock:1:11"));
        let error = Lock::read(Path::new("no/such.lock")).unwrap_err();
        assert_eq!(error.to_string(), "lock `no/such.lock` does not exist");
        assert_eq!(error.exit(), Exit::Request);
    }

    #[test]
    fn differences_are_shown_as_a_diff_with_their_meaning() {
        let found = Lock { recipe: digest('a'), tokenizer: None, artifact: digest('b'), ..lock() };
        let expected = format!(
            "--- lock\n+++ found\n- recipe      {}\n+ recipe      {}\n- tokenizer   {}\n+ tokenizer   (none)\n\
             - artifact    {}\n+ artifact    {}\nthe recipe and the tokenizer changed; so did the artifact\n",
            "2".repeat(64),
            "a".repeat(64),
            "4".repeat(64),
            "5".repeat(64),
            "b".repeat(64)
        );
        assert_eq!(differences_text(&lock().differences(&found), true), expected);
        assert!(lock().differences(&lock()).is_empty());
    }

    #[test]
    fn an_artifact_that_changed_alone_is_called_a_fault_of_the_tool() {
        let found = Lock { artifact: digest('b'), ..lock() };
        let text = differences_text(&lock().differences(&found), true);
        assert!(
            text.ends_with("every input is the same and the artifact is not: please report this\n"),
            "{text}"
        );
    }
}
