//! The model card (`README.md` with front matter, as the Hugging Face hub reads it).
//!
//! It says what was done and how large the result is. It makes no claim of quality: none was measured here.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use crate::digest::Digest;
use crate::tensor::Layout;
use crate::units::Bytes;

/// What the card tells.
#[derive(Debug)]
pub struct Card<'a> {
    /// The recipe's name.
    pub name: &'a str,
    /// The recipe's description.
    pub description: Option<&'a str>,
    /// Repository of the full-precision model, if known.
    pub base_model: Option<&'a str>,
    /// Its pinned commit, if it was fetched by one.
    pub revision: Option<&'a str>,
    /// `model_type` of the source.
    pub model_type: &'a str,
    /// Weights held.
    pub weights: u64,
    /// Bytes of all weight files.
    pub bytes: Bytes,
    /// 8 · bytes / weights.
    pub bits_per_weight: f64,
    /// Codec or `keep`, how many tensors, how many weights, how many bytes.
    pub rows: &'a [CardRow],
    /// Whose names and shapes it has.
    pub layout: Layout,
    /// Whether any weight is stored as codes.
    pub quantized: bool,
    /// Has an `mtp/` folder.
    pub draft: bool,
    /// The recipe's files, base first: name and text.
    pub recipe: &'a [(String, String)],
    /// Program and version.
    pub tool: String,
}

/// One line of the card's table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CardRow {
    /// Codec and encoder.
    pub codec: String,
    /// Modules stored so.
    pub modules: usize,
    /// Their weights.
    pub weights: u64,
    /// Their bytes.
    pub bytes: Bytes,
}

/// The card's text.
pub fn card(card: &Card<'_>) -> Vec<u8> {
    let library = match card.layout {
        Layout::Mlx => "mlx",
        Layout::HuggingFace => "transformers",
    };
    let mut text = format!("---\nlibrary_name: {library}\npipeline_tag: text-generation\n");
    if let Some(base) = card.base_model {
        let _ = writeln!(text, "base_model: {}", serde_json::Value::from(base));
        if card.quantized {
            text.push_str("base_model_relation: quantized\n");
        }
    }
    let _ = writeln!(
        text,
        "tags:\n- {library}\n- tqc{}\n---\n",
        if card.quantized { "\n- quantized" } else { "" }
    );
    let _ = writeln!(text, "# {}\n", card.name);
    if let Some(description) = card.description {
        let _ = writeln!(text, "{description}\n");
    }
    let source = match (card.base_model, card.revision) {
        (Some(base), Some(revision)) => format!("`{base}` at revision `{revision}`"),
        (Some(base), None) => format!("`{base}`"),
        (None, _) => format!("a local `{}` checkpoint", card.model_type),
    };
    let _ = writeln!(
        text,
        "Built by {} from {source}. {} weights in {} of weight files: {:.3} bits per weight, all stored bytes \
         counted (codes, scales, biases, unquantized tensors, headers).\n",
        card.tool, card.weights, card.bytes, card.bits_per_weight
    );
    text.push_str("| stored as | modules | weights | bytes |\n| --- | ---: | ---: | ---: |\n");
    for row in card.rows {
        let _ = writeln!(text, "| {} | {} | {} | {} |", row.codec, row.modules, row.weights, row.bytes.0);
    }
    text.push_str(match card.layout {
        Layout::Mlx => {
            "\nLoads in stock mlx-lm:\n\n```sh\nmlx_lm.generate --model PATH --prompt \"Hello\"\n```\n"
        }
        Layout::HuggingFace => "\nHas the names and shapes of the original: loads where that does.\n",
    });
    if card.draft {
        text.push_str(
            "\nThe draft (MTP) head is in `mtp/`, in the layout that mlx-vlm reads; mlx-lm does not use it.\n",
        );
    }
    text.push_str(
        "\n`provenance.json` names every source file and tensor and every stored tensor by SHA-256; its own \
         SHA-256 is this artifact's digest. `tqc verify PATH --source DIR --rebuild all` checks all of it \
         against the original weights.\n\nNo quality was measured in this build.\n\n## Recipe\n",
    );
    for (name, recipe) in card.recipe {
        // A fence longer than any run of backticks in the recipe's comments.
        let longest = recipe.split(|c| c != '`').map(str::len).max().unwrap_or(0);
        let fence = "`".repeat(3.max(longest + 1));
        let _ = write!(text, "\n`{name}`:\n\n{fence}toml\n{recipe}");
        if !recipe.ends_with('\n') {
            text.push('\n');
        }
        let _ = writeln!(text, "{fence}");
    }
    text.into_bytes()
}

/// The card of a folder that was repacked from the artifact `digest`, whose card was `old`: its front matter, and the
/// numbers of modules by what they were and became.
pub fn repacked_card(
    old: &str,
    name: &str,
    digest: Digest,
    tool: &str,
    modules: &BTreeMap<(&str, &str), usize>,
) -> Vec<u8> {
    let front = old.split_inclusive("\n---\n").next().filter(|front| front.starts_with("---\n"));
    let mut text = front.filter(|front| front.ends_with("\n---\n")).unwrap_or_default().to_owned();
    let _ = writeln!(
        text,
        "\n# {name}, repacked\n\nExpanded by {tool} from the artifact with digest `{digest}` into codecs that stock \
         mlx-lm loads. `repacked.json` has the modules and the digests of all files.\n\n| was | became | modules |\n\
         | --- | --- | ---: |"
    );
    for ((was, became), count) in modules {
        let _ = writeln!(text, "| {was} | {became} | {count} |");
    }
    text.push_str("\n```sh\nmlx_lm.generate --model PATH --prompt \"Hello\"\n```\n");
    text.into_bytes()
}
