//! Globs over dotted names.

use std::fmt;

use globset::{GlobBuilder, GlobMatcher};

/// Which part of a model a pattern speaks of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Scope {
    /// The text model: every pattern that names no other part.
    Trunk,
    /// The draft head: patterns that begin with `mtp.`.
    DraftHead,
    /// The vision tower: patterns that begin with `vision_tower.`.
    Vision,
}

/// A glob over dotted names.
///
/// `*` stands for any characters, dots included; `?` for one; `[a-c]` and `[!a-c]` for one of a set;
/// `{a,b}` for either; `\` takes the next character as it is. The whole name must match.
#[derive(Debug, Clone)]
pub struct Pattern {
    text: String,
    matcher: GlobMatcher,
}

/// Why a pattern cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BadPattern {
    /// It would match only an empty name.
    #[error("a pattern must not be empty")]
    Empty,
    /// Longer than any list of module names needs.
    #[error(
        "a pattern may have {} bytes and {} braces, got {bytes} and {braces}",
        Pattern::BYTES,
        Pattern::BRACES
    )]
    TooLong {
        /// Its length.
        bytes: usize,
        /// How many `{` it has.
        braces: usize,
    },
    /// It does not parse.
    #[error("`{pattern}` is not a glob: {reason}")]
    Syntax {
        /// As written.
        pattern: String,
        /// The parser's words.
        reason: String,
    },
}

impl Pattern {
    // Limits that keep every accepted pattern far below the nesting depth (250) and the program size
    // (10 MiB) of the regular expression it becomes.
    const BYTES: usize = 256;
    const BRACES: usize = 32;

    /// Reads a glob.
    ///
    /// # Errors
    /// [`BadPattern`].
    pub fn new(text: &str) -> Result<Self, BadPattern> {
        if text.is_empty() {
            return Err(BadPattern::Empty);
        }
        let braces = text.matches('{').count();
        if text.len() > Self::BYTES || braces > Self::BRACES {
            return Err(BadPattern::TooLong { bytes: text.len(), braces });
        }
        let glob = GlobBuilder::new(text).literal_separator(false).backslash_escape(true).build().map_err(
            |error| BadPattern::Syntax { pattern: text.to_owned(), reason: error.kind().to_string() },
        )?;
        Ok(Self { text: text.to_owned(), matcher: glob.compile_matcher() })
    }

    /// Whether the whole of `name` matches.
    pub fn matches(&self, name: &str) -> bool {
        self.matcher.is_match(name)
    }

    /// The glob as written.
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// The part of a model it speaks of.
    pub fn scope(&self) -> Scope {
        if self.text.starts_with("mtp.") {
            Scope::DraftHead
        } else if self.text.starts_with("vision_tower.") {
            Scope::Vision
        } else {
            Scope::Trunk
        }
    }

    /// Whether it matches every name of the trunk by its form (`*`, `**`).
    pub fn is_everything(&self) -> bool {
        self.text.bytes().all(|byte| byte == b'*')
    }
}

impl fmt::Display for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl PartialEq for Pattern {
    fn eq(&self, other: &Self) -> bool {
        self.text == other.text
    }
}

impl Eq for Pattern {}

#[cfg(test)]
mod tests {
    use super::*;

    const GATE: &str = "language_model.model.layers.0.mlp.gate_proj";

    #[test]
    fn a_star_crosses_dots_and_the_whole_name_must_match() {
        for (pattern, expected) in [
            ("*", true),
            ("*.mlp.*", true),
            ("*.mlp.{gate,up}_proj", true),
            ("*.layers.[0-3].mlp.gate_proj", true),
            ("*.layers.[!0-3].*", false),
            ("*.layers.?.mlp.gate_proj", true),
            ("*.layers.??.mlp.gate_proj", false),
            (GATE, true),
            ("model.layers.0.mlp.gate_proj", false),
            ("*.mlp.gate", false),
            ("*.MLP.*", false),
        ] {
            assert_eq!(Pattern::new(pattern).unwrap().matches(GATE), expected, "{pattern}");
        }
    }

    #[test]
    fn projections_of_every_kind_of_mlp_match_but_routers_do_not() {
        let pattern = Pattern::new("*.mlp.*_proj").unwrap();
        for module in ["gate_proj", "switch_mlp.down_proj", "shared_expert.up_proj"] {
            assert!(pattern.matches(&format!("model.layers.7.mlp.{module}")), "{module}");
        }
        for router in ["gate", "shared_expert_gate"] {
            assert!(!pattern.matches(&format!("model.layers.7.mlp.{router}")), "{router}");
        }
    }

    #[test]
    fn the_first_word_decides_the_part_of_the_model() {
        for (pattern, scope) in [
            ("mtp.*", Scope::DraftHead),
            ("vision_tower.blocks.*", Scope::Vision),
            ("*mtp.*", Scope::Trunk),
            ("mtp*", Scope::Trunk),
        ] {
            assert_eq!(Pattern::new(pattern).unwrap().scope(), scope, "{pattern}");
        }
    }

    #[test]
    fn refuses_what_is_not_a_glob() {
        for bad in ["", "[a", "{a,b", "a}", "[z-a]", "a\\", &"a".repeat(257), &"{".repeat(33)] {
            assert!(Pattern::new(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn the_deepest_pattern_allowed_still_compiles() {
        let deep = format!("{}x{}", "{a,".repeat(32), "}".repeat(32));
        assert!(Pattern::new(&deep).unwrap().matches("x"));
        let flat = format!("{}x{}", "{".repeat(32), "}".repeat(32));
        assert!(Pattern::new(&flat).is_ok());
        assert!(Pattern::new(&"*".repeat(256)).unwrap().is_everything());
        assert!(Pattern::new(&"[!é-ü]".repeat(32)).is_ok());
    }
}
