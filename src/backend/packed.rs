//! A stored weight, as a device takes it.

use std::ops::Range;
use std::sync::Arc;

use crate::checkpoint::Checkpoint;
use crate::codec::{CodecSpec, Matrix, Part, Plane, codec};
use crate::tensor::Float;

/// Bytes of one plane: part of a mapped file, or owned.
#[derive(Debug, Clone)]
pub enum Stored {
    /// Bytes `range` of file `file` of a checkpoint.
    Mapped {
        /// The open checkpoint.
        checkpoint: Arc<Checkpoint>,
        /// Index into its files.
        file: usize,
        /// Bytes, counted from the file's start.
        range: Range<u64>,
    },
    /// In memory.
    Owned(Arc<Vec<u8>>, Range<usize>),
}

impl Stored {
    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        match self {
            Stored::Mapped { checkpoint, file, range } => {
                &checkpoint.file_bytes(*file)[range.start as usize..range.end as usize]
            }
            Stored::Owned(bytes, range) => &bytes[range.clone()],
        }
    }

    /// Part of them.
    ///
    /// # Panics
    /// If the part leaves them.
    pub fn part(&self, part: Range<usize>) -> Stored {
        assert!(part.start <= part.end && part.end <= self.bytes().len(), "the part lies inside");
        match self {
            Stored::Mapped { checkpoint, file, range } => Stored::Mapped {
                checkpoint: checkpoint.clone(),
                file: *file,
                range: range.start + part.start as u64..range.start + part.end as u64,
            },
            Stored::Owned(bytes, range) => {
                Stored::Owned(bytes.clone(), range.start + part.start..range.start + part.end)
            }
        }
    }

    /// Lets the kernel take the pages of a mapped part back.
    pub fn release(&self) {
        if let Stored::Mapped { checkpoint, file, range } = self {
            checkpoint.release(*file, range.clone());
        }
    }

    /// Asks the kernel to read a mapped part ahead.
    pub fn prefetch(&self) {
        if let Stored::Mapped { checkpoint, file, range } = self {
            checkpoint.prefetch(*file, range.clone());
        }
    }
}

/// A weight [N, K] in a codec.
#[derive(Debug, Clone)]
pub struct Packed {
    /// How it is stored.
    pub codec: CodecSpec,
    /// Type of float storage, and of the codec's parameters.
    pub float: Float,
    /// N.
    pub out_features: usize,
    /// K.
    pub in_features: usize,
    /// Where these rows are in the stored weight: what they share with other rows depends on it.
    pub part: Part,
    /// One entry per plane of the codec: its rows that cover these.
    pub planes: Vec<Stored>,
}

impl Packed {
    /// A matrix [N, K] that is all of the stored weight.
    pub fn whole(
        codec: CodecSpec,
        float: Float,
        out_features: usize,
        in_features: usize,
        planes: Vec<Stored>,
    ) -> Self {
        let matrix = Matrix { out_features: out_features as u64, in_features: in_features as u64 };
        Self { codec, float, out_features, in_features, part: Part { matrix, first: 0 }, planes }
    }

    /// How the planes lie.
    pub fn layout(&self) -> Vec<Plane> {
        let layout = codec(self.codec).planes(self.part.matrix, self.float);
        layout.expect("the weight was checked against its codec when it was opened")
    }

    /// Rows `rows` alone.
    pub fn rows(&self, rows: Range<usize>) -> Packed {
        let (before, first) = (self.part.first, self.part.first + rows.start as u64);
        let of_plane = |(stored, plane): (&Stored, Plane)| {
            let held = plane.covering(before..before + self.out_features as u64);
            let asked = plane.covering(first..before + rows.end as u64);
            stored.part(plane.bytes_of(held.start..asked.start)..plane.bytes_of(held.start..asked.end))
        };
        Packed {
            out_features: rows.len(),
            part: Part { first, ..self.part },
            planes: self.planes.iter().zip(self.layout()).map(of_plane).collect(),
            ..*self
        }
    }

    /// How many rows share bytes: those of a tile.
    pub fn rows_together(&self) -> usize {
        let matrix = self.part.matrix.out_features;
        // What a matrix has for all of its rows is not what a pass over some of them reads.
        self.layout().iter().map(|plane| plane.height).filter(|height| *height < matrix).max().unwrap_or(1)
            as usize
    }

    /// Stored bytes of all planes.
    pub fn bytes(&self) -> u64 {
        self.planes.iter().map(|plane| plane.bytes().len() as u64).sum()
    }

    /// w[n, ..] for the rows `n` in `rows`, in f32: [`crate::codec::Codec::decode`].
    pub fn decode(&self, rows: Range<usize>, out: &mut [f32]) {
        let part = self.rows(rows);
        let planes: Vec<&[u8]> = part.planes.iter().map(Stored::bytes).collect();
        codec(self.codec).decode(part.part, self.float, &planes, out);
    }
}
