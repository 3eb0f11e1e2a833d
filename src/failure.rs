//! How a command ends: what went wrong, whose fault it is, and what to do next.
//!
//! Every module has its own error enum. Each implements [`Failure`], which adds the two things a
//! command line needs beyond the message: the exit code and the remedy.

use std::fmt;

/// How the process ends. The numbers are part of the command-line contract (`docs/cli.md`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exit {
    /// Done, and the answer is yes.
    Done = 0,
    /// Done, and the answer is no (`verify`, `diff`, `build --locked`).
    No = 1,
    /// The request is wrong (command line, recipe); nothing was written.
    Request = 2,
    /// The input is bad (checkpoint, artifact); nothing was written.
    Input = 3,
    /// The machine failed (disk full, permission, out of memory).
    Machine = 4,
    /// Stopped by Ctrl-C or SIGTERM; finished work is kept for `--resume`.
    Interrupted = 130,
}

/// An error a person can act on.
pub trait Failure: std::error::Error + Send + Sync + 'static {
    /// The exit code of a command that ends with this error.
    fn exit(&self) -> Exit;

    /// What to do about it, in one or two lower-case sentences.
    fn help(&self) -> Option<String> {
        None
    }
}

impl<E: Failure> From<E> for Box<dyn Failure> {
    fn from(error: E) -> Self {
        Box::new(error)
    }
}

/// The result of anything that a command calls directly.
pub type Outcome<T> = Result<T, Box<dyn Failure>>;

/// Several errors found in one pass, so that a person mends them all at once.
///
/// The exit code is the first error's.
#[derive(Debug)]
pub struct Problems<E>(Vec<E>);

impl<E> Problems<E> {
    /// `Ok(value)` when `problems` is empty, else all of them.
    pub fn none_or<T>(problems: Vec<E>, value: T) -> Result<T, Self> {
        if problems.is_empty() { Ok(value) } else { Err(Self(problems)) }
    }

    /// These after `first`.
    pub fn after(self, mut first: Vec<E>) -> Self {
        first.extend(self.0);
        Self(first)
    }

    /// The errors, in the order they were found.
    pub fn list(&self) -> &[E] {
        &self.0
    }
}

impl<E> From<E> for Problems<E> {
    fn from(error: E) -> Self {
        Self(vec![error])
    }
}

impl<E: Failure> fmt::Display for Problems<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, problem) in self.0.iter().enumerate() {
            if i > 0 {
                f.write_str("\n")?;
            }
            write!(f, "{problem}")?;
            if i + 1 < self.0.len()
                && let Some(help) = problem.help()
            {
                write!(f, "\nhelp: {help}")?;
            }
        }
        Ok(())
    }
}

impl<E: Failure> std::error::Error for Problems<E> {}

impl<E: Failure> Failure for Problems<E> {
    fn exit(&self) -> Exit {
        self.0.first().map_or(Exit::Request, Failure::exit)
    }

    fn help(&self) -> Option<String> {
        self.0.last().and_then(Failure::help)
    }
}
