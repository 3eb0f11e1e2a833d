//! Every key a recipe may have: what the parser accepts, what it suggests, and the table in
//! `docs/recipes.md`.

use super::text::listed;

/// A table of a recipe file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Section {
    /// The file itself.
    Top,
    /// `[source]`.
    Source,
    /// `[default]`.
    Default,
    /// Each `[[rule]]`.
    Rule,
    /// `[keep]`.
    Keep,
    /// `[transform]`.
    Transform,
    /// `rotation` of `[transform]`.
    Rotation,
    /// `[calibration]`.
    Calibration,
    /// `[gptq]`.
    Gptq,
    /// `[budget]`.
    Budget,
    /// `[output]`.
    Output,
    /// The parameters of `affine`.
    Affine,
    /// The parameters of `trellis`.
    Trellis,
}

impl Section {
    /// Every table, in the order documents list them.
    pub const ALL: [Section; 13] = [
        Section::Top,
        Section::Source,
        Section::Default,
        Section::Rule,
        Section::Keep,
        Section::Transform,
        Section::Rotation,
        Section::Calibration,
        Section::Gptq,
        Section::Budget,
        Section::Output,
        Section::Affine,
        Section::Trellis,
    ];

    /// What a message calls it.
    pub fn title(self) -> &'static str {
        match self {
            Section::Top => "a recipe",
            Section::Source => "`[source]`",
            Section::Default => "`[default]`",
            Section::Rule => "`[[rule]]`",
            Section::Keep => "`[keep]`",
            Section::Transform => "`[transform]`",
            Section::Rotation => "`rotation`",
            Section::Calibration => "`[calibration]`",
            Section::Gptq => "`[gptq]`",
            Section::Budget => "`[budget]`",
            Section::Output => "`[output]`",
            Section::Affine => "`affine`",
            Section::Trellis => "`trellis`",
        }
    }

    /// What stands before its keys in the reference.
    fn prefix(self) -> &'static str {
        match self {
            Section::Top => "",
            Section::Source => "source.",
            Section::Default => "default.",
            Section::Rule => "rule.",
            Section::Keep => "keep.",
            Section::Transform => "transform.",
            Section::Rotation => "transform.rotation.",
            Section::Calibration => "calibration.",
            Section::Gptq => "gptq.",
            Section::Budget => "budget.",
            Section::Output => "output.",
            Section::Affine => "codec.affine.",
            Section::Trellis => "codec.trellis.",
        }
    }

    /// Its keys.
    pub fn keys(self) -> impl Iterator<Item = &'static Key> {
        KEYS.iter().filter(move |key| key.section == self)
    }
}

/// One key.
#[derive(Debug)]
pub struct Key {
    /// Where it stands.
    pub section: Section,
    /// Its name.
    pub name: &'static str,
    /// Its type, in words.
    pub kind: &'static str,
    /// What its absence means.
    pub default: &'static str,
    /// What it does.
    pub meaning: &'static str,
}

const fn key(
    section: Section,
    name: &'static str,
    kind: &'static str,
    default: &'static str,
    meaning: &'static str,
) -> Key {
    Key { section, name, kind, default, meaning }
}

/// Every key of every table.
pub static KEYS: &[Key] = &[
    key(
        Section::Top,
        "name",
        "string",
        "required",
        "The artifact's name and its folder's: letters, digits, `-`, `_` and `.`; not inherited",
    ),
    key(Section::Top, "description", "string", "none", "One line for the model card; not inherited"),
    key(
        Section::Top,
        "base-model",
        "string",
        "the hub source",
        "Repository of the original model, `org/name`, for the model card; not inherited",
    ),
    key(Section::Top, "extends", "path", "none", "A base recipe that this one changes"),
    key(Section::Top, "pipeline", "string", "`\"rtn\"`", "The stages and their order"),
    key(
        Section::Top,
        "seed",
        "integer",
        "`0`",
        "Where stages that draw random numbers start; 0 to 9223372036854775807",
    ),
    key(
        Section::Top,
        "source",
        "table",
        "from `--source`",
        "The checkpoint to read: a folder or a Hub repository",
    ),
    key(Section::Top, "default", "table", "required", "What a tensor takes that no rule matches"),
    key(
        Section::Top,
        "rule",
        "array of tables",
        "none",
        "What the modules that match take; the first match wins",
    ),
    key(Section::Top, "keep", "table", "none", "Tensors to store untouched"),
    key(
        Section::Top,
        "transform",
        "table",
        "none",
        "Changes of basis that leave what the model computes as it is",
    ),
    key(
        Section::Top,
        "calibration",
        "table",
        "the built-in text",
        "The text whose activations weigh the errors of `gptq` and `gptq-refit`",
    ),
    key(Section::Top, "gptq", "table", "none", "How these two round"),
    key(
        Section::Top,
        "budget",
        "table",
        "none",
        "How many bytes the weights may take; modules without a rule get their codecs by it",
    ),
    key(Section::Top, "output", "table", "none", "Where the artifact goes and how it is split"),
    key(Section::Source, "path", "path", "none", "A folder that holds a checkpoint"),
    key(Section::Source, "hub", "string", "none", "A Hugging Face repository, `org/name`"),
    key(Section::Source, "revision", "string", "required with `hub`", "The commit: 40 hexadecimal digits"),
    key(Section::Default, "codec", "codec", "required", "How weights are stored"),
    key(
        Section::Default,
        "encoder",
        "string",
        "`\"mlx\"`, or `\"trellis\"` for a trellis",
        "How codes are found: `mlx`, `refit`, `gptq` or `gptq-refit`; `trellis` or `ldlq` for a trellis",
    ),
    key(Section::Rule, "match", "glob", "required", "Which modules"),
    key(
        Section::Rule,
        "codec",
        "codec",
        "required without a limit",
        "How their weights are stored, whatever the budget",
    ),
    key(
        Section::Rule,
        "encoder",
        "string",
        "`default.encoder`",
        "How their codes are found; where the default's encoder cannot fill the codec, its like: `ldlq` for `gptq-refit` and the reverse, `refit` for `trellis`, else `mlx` or `trellis`",
    ),
    key(
        Section::Rule,
        "least-bits",
        "integer",
        "none",
        "The fewest bits of a code that the budget may give them; 1 to 32, without `codec`",
    ),
    key(
        Section::Rule,
        "most-bits",
        "integer",
        "none",
        "The most bits of a code that the budget may give them; 1 to 32, without `codec`",
    ),
    key(
        Section::Keep,
        "tensors",
        "array of globs",
        "`[]`",
        "Names of source tensors that the architecture does not know, to store as they are",
    ),
    key(
        Section::Transform,
        "gamma-fold",
        "boolean",
        "`true` with a rotation, else `false`",
        "Gains of norms go into the weights that read them; a tied head becomes a matrix of its own",
    ),
    key(
        Section::Transform,
        "rotation",
        "kind or table",
        "`\"none\"`",
        "The basis of the residual stream: `none`, `hadamard`, `random-orthogonal`, `block-hadamard`, `optrot`, \
         `auto`, or `measure` for the best of them",
    ),
    key(
        Section::Transform,
        "key-balance",
        "boolean",
        "`false`",
        "Channels of keys get even sizes, those of queries the inverse",
    ),
    key(
        Section::Transform,
        "value-balance",
        "boolean",
        "`false`",
        "Channels of values and the columns that read them get even sizes",
    ),
    key(
        Section::Transform,
        "value-order",
        "boolean",
        "`false`",
        "Channels of values in the order of their sizes, so that a group holds like ones",
    ),
    key(
        Section::Transform,
        "up-balance",
        "boolean",
        "`false`",
        "Inner channels of MLPs: rows of `up_proj` and columns of `down_proj` get even sizes",
    ),
    key(
        Section::Transform,
        "text",
        "path",
        "built-in text",
        "A JSONL file of `text` or `messages` that `measure` scores on",
    ),
    key(Section::Transform, "tokens", "integer", "`1024`", "The most tokens of it; 16 to 1048576"),
    key(Section::Rotation, "kind", "string", "required", "As `transform.rotation`"),
    key(
        Section::Rotation,
        "seed",
        "integer",
        "`42`",
        "Where its signs or Gaussians start; 0 to 9223372036854775807",
    ),
    key(
        Section::Rotation,
        "r2",
        "boolean or `\"auto\"`",
        "`\"auto\"`",
        "Whether value heads are rotated too; `auto`: where that is exact",
    ),
    key(
        Section::Rotation,
        "block",
        "integer",
        "the default codec's group",
        "Width of a block of `block-hadamard`; must divide the stream's width",
    ),
    key(Section::Rotation, "steps", "integer", "`60`", "Most steps of descent of `optrot`; 1 to 10000"),
    key(
        Section::Calibration,
        "text",
        "path",
        "built-in text",
        "A JSONL file of `text` or `messages`, the latter through the chat template",
    ),
    key(Section::Calibration, "sha256", "string", "none", "What the SHA-256 of `text` must be"),
    key(Section::Calibration, "rows", "integer", "`128`", "Rows to take; 1 to 1048576"),
    key(Section::Calibration, "context", "integer", "`512`", "Most tokens of a row; 16 to 1048576"),
    key(
        Section::Calibration,
        "packing",
        "string",
        "`\"documents\"`",
        "`documents`: a row is the beginning of one; `joined`: documents in a row, an end token after each, cut into rows \
         of one length",
    ),
    key(
        Section::Calibration,
        "seed",
        "integer",
        "`seed`",
        "Which documents come first; 0 to 9223372036854775807",
    ),
    key(
        Section::Calibration,
        "activations",
        "string",
        "`\"unrounded\"`",
        "Whose activations: `unrounded`, the source's; `sequential`, those of the layers before as they will be stored",
    ),
    key(
        Section::Calibration,
        "hessians",
        "path",
        "none",
        "A file of second moments to use instead of a text, as `tqc calibrate` writes it",
    ),
    key(
        Section::Calibration,
        "few-tokens",
        "string",
        "`\"shared\"`",
        "What experts get that saw fewer than `expert-tokens`: `shared`, the second moment of all experts of the layer; \
         `nearest`, rounding to nearest",
    ),
    key(Section::Calibration, "expert-tokens", "integer", "`256`", "See `few-tokens`; 0 to 16777216"),
    key(
        Section::Gptq,
        "damping",
        "number",
        "`0.01`",
        "What is first added to the diagonal of second moments, over its mean; above 0, at most 10",
    ),
    key(
        Section::Gptq,
        "act-order",
        "boolean",
        "`false`",
        "Columns are rounded in falling order of their inputs' size; where they are stored does not change",
    ),
    key(
        Section::Gptq,
        "sweeps",
        "integer",
        "`2`",
        "Rounds of coordinate descent on codes and scales of `gptq-refit` and `ldlq`; 0 to 100",
    ),
    key(
        Section::Budget,
        "bits-per-weight",
        "number",
        "one of three",
        "All bytes of the weight files over all weights; 1 to 64",
    ),
    key(
        Section::Budget,
        "code-bits",
        "number",
        "one of three",
        "Bits of codes, on average, for each weight of the modules that the budget decides, scales and all else not counted; 1 to 64",
    ),
    key(Section::Budget, "bytes", "size", "one of three", "All bytes of the weight files"),
    key(
        Section::Budget,
        "sensitivity",
        "path",
        "required",
        "What each module costs in each codec: a file of `tqc sensitivity` or of another tool",
    ),
    key(
        Section::Budget,
        "candidates",
        "array of strings",
        "affine, at the default's group",
        "Codecs to choose from, as `\"affine-4g64\"` or `\"mxfp4\"`; by default those of all widths that the file has",
    ),
    key(Section::Budget, "method", "string", "`\"exact\"`", "How to choose: `exact` or `greedy`"),
    key(
        Section::Budget,
        "control",
        "string",
        "`\"report\"`",
        "If an even choice of the same bytes is better: `stop`, `report`, or `off` to not compare",
    ),
    key(
        Section::Budget,
        "text",
        "path",
        "built-in text",
        "A JSONL file of `text` or `messages` to compare on",
    ),
    key(Section::Output, "directory", "path", "the command's choice", "The artifact's folder; not inherited"),
    key(
        Section::Output,
        "layout",
        "string",
        "`\"mlx\"`",
        "Whose names and shapes are written: `mlx`, or `huggingface` for floats in the source's own",
    ),
    key(Section::Output, "shard-size", "size", "`\"5GB\"`", "The most a weight file may hold; at least 1 MB"),
    key(Section::Affine, "bits", "integer", "required", "Bits of a code: 2, 3, 4, 5, 6 or 8"),
    key(
        Section::Affine,
        "group",
        "integer",
        "required",
        "Weights that share a scale and a bias: 32, 64 or 128",
    ),
    key(Section::Trellis, "bits", "integer", "required", "Bits of a weight: 1, 2, 3 or 4"),
    key(
        Section::Trellis,
        "states",
        "integer",
        "`12`",
        "How many bits of the past a weight depends on, 10 to 16: more take longer to encode and err less; decoding is the same",
    ),
    key(
        Section::Trellis,
        "code",
        "string",
        "`\"bs12\"`",
        "What states are worth: `1mad`, `bs12`, `mul1`, `3inst`, `mcg`, `rptc` or `random`",
    ),
    key(
        Section::Trellis,
        "along",
        "string",
        "`\"outputs\"`",
        "What neighbours in a tile are: weights of one input to many `outputs`, or of one output from many `inputs`",
    ),
    key(
        Section::Trellis,
        "scales",
        "string",
        "`\"both\"`",
        "`both`: each input and each output has a scale; `one`: only what the weights of a tile have in common",
    ),
];

/// The reference table of `docs/recipes.md`, one row a key.
pub fn reference() -> String {
    let mut text = String::from("| key | type | default | meaning |\n| --- | --- | --- | --- |\n");
    for key in Section::ALL.into_iter().flat_map(Section::keys) {
        let Key { section, name, kind, default, meaning } = key;
        text.push_str(&format!("| `{}{name}` | {kind} | {default} | {meaning} |\n", section.prefix()));
    }
    text
}

/// Where else than `here` a key `name` would be known; for messages.
pub(super) fn elsewhere(name: &str, here: Section) -> Option<String> {
    if here != Section::Top && Section::Top.keys().any(|key| key.name == name) {
        return Some("at the top of the file, above the first table".to_owned());
    }
    let titles: Vec<&str> = KEYS
        .iter()
        .filter(|key| key.name == name && key.section != here)
        .map(|key| key.section.title().trim_matches('`'))
        .collect();
    (!titles.is_empty()).then(|| format!("in {}", listed(titles)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_table_has_a_key_twice_and_no_table_is_empty() {
        for section in Section::ALL {
            let mut names: Vec<_> = section.keys().map(|key| key.name).collect();
            assert!(!names.is_empty(), "{section:?}");
            names.sort_unstable();
            assert!(names.windows(2).all(|pair| pair[0] != pair[1]), "{section:?}");
        }
    }
}
