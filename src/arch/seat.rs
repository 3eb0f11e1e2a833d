//! Where a parameter stands to the bases of a decoder that can be changed without changing what it computes.
//!
//! A residual stream may live in any orthogonal basis R, if norms over it have no gain of their own: what reads the
//! stream, writes to it or is a point of it changes along. The channels between two linear layers may be scaled and
//! reordered. An adapter says of each parameter which of these spaces its axes are in; what to do about it is
//! [`crate::plan`]'s to say. The rules are in `docs/transforms.md`.

/// A parameter's place.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Seat {
    /// Its place at a residual stream.
    pub stream: Stand,
    /// Its place among the channels inside a layer.
    pub part: Option<Part>,
}

/// A place at a residual stream: the trunk's, or the draft head's own for parameters of the draft head.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Stand {
    /// None of its axes is the stream.
    #[default]
    Apart,
    /// Its rows are points of the trunk's stream: the input embedding.
    Points,
    /// The gain of an RMS norm over the stream, all of whose readers are known.
    Gain,
    /// Its last axis is what this norm gives: the path of the norm's module.
    Reads(String),
    /// Its output is added to the stream: the last axis but one, or the axis of a bias vector.
    Writes,
    /// The draft head's `fc [H, 2H]`: the first half of the last axis is the normed embedding, the second the normed
    /// hidden state of the trunk, and its output starts the draft head's stream.
    Joins {
        /// Path of the norm over embeddings.
        embedding: String,
        /// Path of the norm over hidden states.
        hidden: String,
    },
}

/// A place among the channels of an attention or an MLP.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// Gives queries (and, where they are gated, gates): [H · Dh, ..] or [H · 2 Dh, ..].
    Query,
    /// Gives keys: [G · Dh, ..].
    Key,
    /// Gives values: [G · Dh, ..].
    Value,
    /// Reads what attention made of values: [.., H · Dh].
    Attended,
    /// The gain over each query head: [Dh].
    QueryGain,
    /// The gain over each key head: [Dh].
    KeyGain,
    /// Gives the factor of an MLP's inner channels that goes through the activation: [I, ..].
    Gate,
    /// Gives the other factor: [I, ..].
    Up,
    /// Reads the product: [.., I].
    Down,
}

impl Seat {
    /// Reads what the norm at `norm` gives.
    pub fn reads(norm: &str) -> Self {
        Self { stream: Stand::Reads(norm.to_owned()), part: None }
    }

    /// Adds to the stream.
    pub fn writes() -> Self {
        Self { stream: Stand::Writes, part: None }
    }

    /// A gain over the stream.
    pub fn gain() -> Self {
        Self { stream: Stand::Gain, part: None }
    }

    /// The same, and a place inside the layer.
    pub fn part(self, part: Part) -> Self {
        Self { part: Some(part), ..self }
    }
}

impl From<Part> for Seat {
    fn from(part: Part) -> Self {
        Self { stream: Stand::Apart, part: Some(part) }
    }
}
