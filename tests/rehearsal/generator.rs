//! A checkpoint with Qwen3.8-27B's names, shapes and sizes, without its weights.
//!
//! The files are sparse: each shard's header is written and the payload is a hole that reads as zeros, so
//! 55.6 GB of checkpoint takes a few hundred kilobytes of disk. Chosen layers can be given values, which are
//! bf16, about Gaussian (the sum of four uniform numbers, standard deviation 0.02), and depend on nothing but
//! the tensor's name. [`Architecture::small`] has the same structure at toy widths, for tests.
//!
//! Names and shapes: the published headers of Qwen3.8-27B (851 tensors of text and head, 15 of the draft head,
//! 333 of the vision tower; 55 562 855 904 bytes). Shards follow the order of the names, as the published ones do.

#![allow(dead_code, reason = "each test target that includes this module uses a part of it")]

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{self, BufWriter, Seek as _, SeekFrom, Write as _};
use std::path::Path;

use serde_json::{Value, json};

/// The numbers that fix every name and shape of a `qwen3_5` checkpoint.
pub struct Architecture {
    pub vocab: u64,
    pub hidden: u64,
    pub intermediate: u64,
    pub layers: u64,
    /// Layer `i` has full attention when `(i + 1) % full_attention_interval == 0`.
    pub full_attention_interval: u64,
    pub heads: u64,
    pub kv_heads: u64,
    pub head_dim: u64,
    pub linear_key_heads: u64,
    pub linear_value_heads: u64,
    pub linear_key_dim: u64,
    pub linear_value_dim: u64,
    pub conv_kernel: u64,
    pub vision: Vision,
    /// `<|endoftext|>` and `<|im_end|>`.
    pub end_tokens: [u64; 2],
}

/// The same for the vision tower.
pub struct Vision {
    pub depth: u64,
    pub hidden: u64,
    pub intermediate: u64,
    pub heads: u64,
    pub positions: u64,
    pub patch: u64,
    pub temporal_patch: u64,
    pub merge: u64,
}

impl Architecture {
    /// Qwen3.8-27B.
    pub fn qwen38_27b() -> Self {
        Self {
            vocab: 248_320,
            hidden: 5120,
            intermediate: 17_408,
            layers: 64,
            full_attention_interval: 4,
            heads: 24,
            kv_heads: 4,
            head_dim: 256,
            linear_key_heads: 16,
            linear_value_heads: 48,
            linear_key_dim: 128,
            linear_value_dim: 128,
            conv_kernel: 4,
            vision: Vision {
                depth: 27,
                hidden: 1152,
                intermediate: 4304,
                heads: 16,
                positions: 2304,
                patch: 16,
                temporal_patch: 2,
                merge: 2,
            },
            end_tokens: [248_044, 248_046],
        }
    }

    /// The same structure in 3.7 MB; every width is a multiple of 64.
    pub fn small() -> Self {
        Self {
            vocab: 512,
            hidden: 128,
            intermediate: 256,
            layers: 8,
            full_attention_interval: 4,
            heads: 4,
            kv_heads: 2,
            head_dim: 32,
            linear_key_heads: 2,
            linear_value_heads: 6,
            linear_key_dim: 32,
            linear_value_dim: 32,
            conv_kernel: 4,
            vision: Vision {
                depth: 2,
                hidden: 32,
                intermediate: 64,
                heads: 2,
                positions: 16,
                patch: 4,
                temporal_patch: 2,
                merge: 2,
            },
            end_tokens: [500, 502],
        }
    }

    /// True for a layer with full attention.
    pub fn is_full(&self, layer: u64) -> bool {
        (layer + 1).is_multiple_of(self.full_attention_interval)
    }

    /// Every tensor, sorted by name.
    pub fn tensors(&self) -> Vec<Tensor> {
        let mut all = Vec::new();
        let mut add = |layer: Option<u64>, name: String, shape: &[u64]| {
            all.push(Tensor { name, shape: shape.to_vec(), layer });
        };
        let text = "model.language_model";
        add(None, "lm_head.weight".into(), &[self.vocab, self.hidden]);
        add(None, format!("{text}.embed_tokens.weight"), &[self.vocab, self.hidden]);
        add(None, format!("{text}.norm.weight"), &[self.hidden]);
        for layer in 0..self.layers {
            for (name, shape) in self.decoder_layer(self.is_full(layer)) {
                add(Some(layer), format!("{text}.layers.{layer}.{name}"), &shape);
            }
        }

        add(None, "mtp.fc.weight".into(), &[self.hidden, 2 * self.hidden]);
        for norm in ["norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"] {
            add(None, format!("mtp.{norm}.weight"), &[self.hidden]);
        }
        for (name, shape) in self.decoder_layer(true) {
            add(None, format!("mtp.layers.0.{name}"), &shape);
        }

        for (name, shape) in self.tower() {
            add(None, format!("model.visual.{name}"), &shape);
        }
        all.sort_by(|a, b| a.name.cmp(&b.name));
        all
    }

    fn decoder_layer(&self, full: bool) -> Vec<(&'static str, Vec<u64>)> {
        let (h, i) = (self.hidden, self.intermediate);
        let mut list = vec![
            ("input_layernorm.weight", vec![h]),
            ("post_attention_layernorm.weight", vec![h]),
            ("mlp.gate_proj.weight", vec![i, h]),
            ("mlp.up_proj.weight", vec![i, h]),
            ("mlp.down_proj.weight", vec![h, i]),
        ];
        if full {
            let (q, kv) = (self.heads * self.head_dim, self.kv_heads * self.head_dim);
            list.extend([
                // Each head's query rows are followed by its gate rows.
                ("self_attn.q_proj.weight", vec![2 * q, h]),
                ("self_attn.k_proj.weight", vec![kv, h]),
                ("self_attn.v_proj.weight", vec![kv, h]),
                ("self_attn.o_proj.weight", vec![h, q]),
                ("self_attn.q_norm.weight", vec![self.head_dim]),
                ("self_attn.k_norm.weight", vec![self.head_dim]),
            ]);
        } else {
            let values = self.linear_value_heads * self.linear_value_dim;
            let channels = 2 * self.linear_key_heads * self.linear_key_dim + values;
            list.extend([
                ("linear_attn.in_proj_qkv.weight", vec![channels, h]),
                ("linear_attn.in_proj_z.weight", vec![values, h]),
                ("linear_attn.in_proj_a.weight", vec![self.linear_value_heads, h]),
                ("linear_attn.in_proj_b.weight", vec![self.linear_value_heads, h]),
                ("linear_attn.conv1d.weight", vec![channels, 1, self.conv_kernel]),
                ("linear_attn.A_log", vec![self.linear_value_heads]),
                ("linear_attn.dt_bias", vec![self.linear_value_heads]),
                ("linear_attn.norm.weight", vec![self.linear_value_dim]),
                ("linear_attn.out_proj.weight", vec![h, values]),
            ]);
        }
        list
    }

    fn tower(&self) -> Vec<(String, Vec<u64>)> {
        let Vision { depth, hidden: w, intermediate: m, positions, patch, temporal_patch, merge, .. } =
            self.vision;
        let merged = w * merge * merge;
        let mut list = vec![
            ("patch_embed.proj.weight".to_owned(), vec![w, 3, temporal_patch, patch, patch]),
            ("patch_embed.proj.bias".to_owned(), vec![w]),
            ("pos_embed.weight".to_owned(), vec![positions, w]),
        ];
        let mut affine = |name: String, weight: Vec<u64>| {
            list.push((format!("{name}.bias"), vec![weight[0]]));
            list.push((format!("{name}.weight"), weight));
        };
        for j in 0..depth {
            affine(format!("blocks.{j}.norm1"), vec![w]);
            affine(format!("blocks.{j}.norm2"), vec![w]);
            affine(format!("blocks.{j}.attn.qkv"), vec![3 * w, w]);
            affine(format!("blocks.{j}.attn.proj"), vec![w, w]);
            affine(format!("blocks.{j}.mlp.linear_fc1"), vec![m, w]);
            affine(format!("blocks.{j}.mlp.linear_fc2"), vec![w, m]);
        }
        affine("merger.norm".to_owned(), vec![w]);
        affine("merger.linear_fc1".to_owned(), vec![merged, merged]);
        affine("merger.linear_fc2".to_owned(), vec![self.hidden, merged]);
        list
    }

    /// The checkpoint's config.json.
    pub fn config(&self) -> Value {
        let [end_of_text, _] = self.end_tokens;
        json!({
            "architectures": ["Qwen3_5ForConditionalGeneration"],
            "model_type": "qwen3_5",
            "image_token_id": end_of_text + 12,
            "video_token_id": end_of_text + 13,
            "vision_start_token_id": end_of_text + 9,
            "vision_end_token_id": end_of_text + 10,
            "language_model_only": false,
            "tie_word_embeddings": false,
            "text_config": self.text_config(),
            "vision_config": self.vision_config(),
        })
    }

    fn text_config(&self) -> Value {
        let kinds: Vec<&str> = (0..self.layers)
            .map(|layer| if self.is_full(layer) { "full_attention" } else { "linear_attention" })
            .collect();
        // A quarter of the head is rotated; in the 27B its 32 frequencies are shared out 11 : 11 : 10.
        let frequencies = self.head_dim / 8;
        let last = frequencies / 3;
        let first = (frequencies - last).div_ceil(2);
        let mut config = json!({
            "full_attention_interval": self.full_attention_interval,
            "head_dim": self.head_dim,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "layer_types": kinds,
            "linear_conv_kernel_dim": self.conv_kernel,
            "linear_key_head_dim": self.linear_key_dim,
            "linear_num_key_heads": self.linear_key_heads,
            "linear_num_value_heads": self.linear_value_heads,
            "linear_value_head_dim": self.linear_value_dim,
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.kv_heads,
            "vocab_size": self.vocab,
            "eos_token_id": self.end_tokens[0],
        });
        let constants = json!({
            "model_type": "qwen3_5_text",
            "attention_bias": false,
            "attention_dropout": 0.0,
            "attn_output_gate": true,
            "bos_token_id": null,
            "dtype": "bfloat16",
            "hidden_act": "silu",
            "initializer_range": 0.02,
            "mamba_ssm_dtype": "float32",
            "max_position_embeddings": 262_144,
            "mtp_num_hidden_layers": 1,
            "mtp_use_dedicated_embeddings": false,
            "output_gate_type": "swish",
            "pad_token_id": null,
            "partial_rotary_factor": 0.25,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": false,
            "use_cache": true,
        });
        config["rope_parameters"] = json!({
            "mrope_interleaved": true,
            "mrope_section": [first, frequencies - first - last, last],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10_000_000,
            "rope_type": "default",
        });
        for (key, value) in constants.as_object().expect("it is written as an object above") {
            config[key] = value.clone();
        }
        config
    }

    fn vision_config(&self) -> Value {
        json!({
            "model_type": "qwen3_5",
            "deepstack_visual_indexes": [],
            "depth": self.vision.depth,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": self.vision.hidden,
            "in_channels": 3,
            "initializer_range": 0.02,
            "intermediate_size": self.vision.intermediate,
            "num_heads": self.vision.heads,
            "num_position_embeddings": self.vision.positions,
            "out_hidden_size": self.hidden,
            "patch_size": self.vision.patch,
            "spatial_merge_size": self.vision.merge,
            "temporal_patch_size": self.vision.temporal_patch,
        })
    }
}

/// One bf16 tensor of the checkpoint.
pub struct Tensor {
    pub name: String,
    pub shape: Vec<u64>,
    /// The decoder layer it belongs to; none for embeddings, draft head and vision tower.
    pub layer: Option<u64>,
}

impl Tensor {
    /// Payload bytes: two for each element.
    pub fn bytes(&self) -> u64 {
        2 * self.shape.iter().product::<u64>()
    }

    /// Writes the tensor's values: bf16, mean 0, standard deviation 0.02, decided by the name alone.
    pub fn write_values(&self, out: &mut impl io::Write) -> io::Result<()> {
        // FNV-1a of the name seeds splitmix64.
        let mut state = self.name.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
        });
        let mut row = Vec::with_capacity(1 << 16);
        for _ in 0..self.bytes() / 2 {
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut z = state;
            z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            z ^= z >> 31;
            // The sum of four uniform 16-bit numbers has variance 4 · 2^32 / 12, so 0.02 is sigma below.
            let sum = (z & 0xffff) + (z >> 16 & 0xffff) + (z >> 32 & 0xffff) + (z >> 48);
            let centred = sum as f32 - 131_070.0;
            let value = centred * (0.02 / 37_837.2);
            let bits = value.to_bits();
            let rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
            row.extend_from_slice(&(rounded as u16).to_le_bytes());
            if row.len() == 1 << 16 {
                out.write_all(&row)?;
                row.clear();
            }
        }
        out.write_all(&row)
    }
}

/// Tensors that hold values.
#[derive(Default)]
pub struct Filled {
    /// Decoder layers.
    pub layers: BTreeSet<u64>,
    /// The embedding, without which every layer reads zeros.
    pub embedding: bool,
}

impl Filled {
    fn has(&self, tensor: &Tensor) -> bool {
        match tensor.layer {
            Some(layer) => self.layers.contains(&layer),
            None => self.embedding && tensor.name.ends_with("embed_tokens.weight"),
        }
    }
}

/// What [`write`] made.
pub struct Written {
    pub shards: usize,
    pub tensors: usize,
    /// Bytes of all tensors, headers not counted.
    pub payload: u64,
}

/// Writes a checkpoint of `architecture` into `folder`, which is made if it is missing.
///
/// The payload is cut into at most `shards` files of about equal size; what is `filled` holds values
/// (see [`Tensor::write_values`]) and everything else reads as zeros.
pub fn write(
    folder: &Path,
    architecture: &Architecture,
    shards: u64,
    filled: &Filled,
) -> io::Result<Written> {
    fs::create_dir_all(folder)?;
    let tensors = architecture.tensors();
    let payload: u64 = tensors.iter().map(Tensor::bytes).sum();
    let share = payload.div_ceil(shards.max(1));

    // A tensor belongs to the shard that its first byte falls into; one that spans a whole share leaves a gap
    // in the numbers, which closes here.
    let mut cuts: BTreeMap<u64, Vec<&Tensor>> = BTreeMap::new();
    let mut start = 0;
    for tensor in &tensors {
        cuts.entry(start / share).or_default().push(tensor);
        start += tensor.bytes();
    }

    let mut weight_map = BTreeMap::new();
    for (number, members) in cuts.values().enumerate() {
        let file = format!("model-{:05}-of-{:05}.safetensors", number + 1, cuts.len());
        write_shard(&folder.join(&file), members, filled)?;
        weight_map.extend(members.iter().map(|tensor| (tensor.name.as_str(), file.clone())));
    }

    let index = json!({ "metadata": { "total_size": payload }, "weight_map": weight_map });
    write_json(folder, "model.safetensors.index.json", &index)?;
    write_json(folder, "config.json", &architecture.config())?;
    let [end_of_text, im_end] = architecture.end_tokens;
    let generation = json!({ "do_sample": true, "eos_token_id": [im_end, end_of_text], "pad_token_id": end_of_text,
        "temperature": 1.0, "top_k": 20, "top_p": 0.95 });
    write_json(folder, "generation_config.json", &generation)?;
    write_json(folder, "tokenizer.json", &tokenizer(architecture))?;
    let settings = json!({ "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>", "model_max_length": 262_144,
        "chat_template": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}" });
    write_json(folder, "tokenizer_config.json", &settings)?;
    Ok(Written { shards: cuts.len(), tensors: tensors.len(), payload })
}

/// Eight little-endian bytes of header length, the header padded with spaces to a multiple of 8, the payload.
fn write_shard(path: &Path, members: &[&Tensor], filled: &Filled) -> io::Result<()> {
    let mut header = serde_json::Map::new();
    header.insert("__metadata__".to_owned(), json!({ "format": "pt" }));
    let mut at = 0;
    for tensor in members {
        let end = at + tensor.bytes();
        let entry = json!({ "dtype": "BF16", "shape": tensor.shape, "data_offsets": [at, end] });
        header.insert(tensor.name.clone(), entry);
        at = end;
    }
    let mut text = serde_json::to_vec(&header)?;
    text.resize(text.len().next_multiple_of(8), b' ');

    let mut file = File::create(path)?;
    file.write_all(&(text.len() as u64).to_le_bytes())?;
    file.write_all(&text)?;
    let payload = 8 + text.len() as u64;
    file.set_len(payload + at)?;
    let mut at = payload;
    for tensor in members {
        if filled.has(tensor) {
            file.seek(SeekFrom::Start(at))?;
            let mut out = BufWriter::new(&mut file);
            tensor.write_values(&mut out)?;
            out.flush()?;
        }
        at += tensor.bytes();
    }
    Ok(())
}

/// A word-level tokenizer with the two end tokens: valid, and useless for text.
fn tokenizer(architecture: &Architecture) -> Value {
    let [end_of_text, im_end] = architecture.end_tokens;
    let special = |id: u64, content: &str| {
        json!({ "id": id, "content": content, "special": true, "single_word": false, "lstrip": false,
            "rstrip": false, "normalized": false })
    };
    json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": [special(end_of_text, "<|endoftext|>"), special(im_end, "<|im_end|>")],
        "normalizer": null,
        "pre_tokenizer": { "type": "Whitespace" },
        "post_processor": null,
        "decoder": null,
        "model": {
            "type": "WordLevel",
            "vocab": { "<unk>": 0, "the": 1, "rehearsal": 2, "<|endoftext|>": end_of_text, "<|im_end|>": im_end },
            "unk_token": "<unk>",
        },
    })
}

fn write_json(folder: &Path, name: &str, value: &Value) -> io::Result<()> {
    let mut text = serde_json::to_vec_pretty(value)?;
    text.push(b'\n');
    fs::write(folder.join(name), text)
}
