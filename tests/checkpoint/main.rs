//! A checkpoint is read whole and right, or refused with the name of what is wrong.

use std::collections::HashMap;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use safetensors::tensor::TensorView;
use tempfile::TempDir;
use tqc::checkpoint::{Checkpoint, CheckpointError, INDEX, Links, REPORTED};
use tqc::failure::{Exit, Failure};
use tqc::tensor::{Dtype, Shape};

/// A file with this header and so many data bytes 0, 1, 2, …
fn raw(header: &str, data: usize) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(header.as_bytes());
    bytes.extend((0..data).map(|i| i as u8));
    bytes
}

/// A correct file of BF16 `[2, 2]` tensors.
fn shard(names: &[&str]) -> Vec<u8> {
    let entries: Vec<String> = names
        .iter()
        .enumerate()
        .map(|(i, name)| {
            format!(r#""{name}":{{"dtype":"BF16","shape":[2,2],"data_offsets":[{},{}]}}"#, 8 * i, 8 * i + 8)
        })
        .collect();
    raw(&format!("{{{}}}", entries.join(",")), 8 * names.len())
}

fn index(pairs: &[(&str, &str)]) -> String {
    let map: Vec<String> = pairs.iter().map(|(tensor, file)| format!(r#""{tensor}":"{file}""#)).collect();
    format!(r#"{{"metadata":{{"total_size":1}},"weight_map":{{{}}}}}"#, map.join(","))
}

fn folder(files: &[(&str, &[u8])]) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    for (name, bytes) in files {
        fs::write(dir.path().join(name), bytes).unwrap();
    }
    dir
}

const SHARD_1: &str = "model-00001-of-00002.safetensors";
const SHARD_2: &str = "model-00002-of-00002.safetensors";

fn two_shards(index: &str) -> TempDir {
    folder(&[(SHARD_1, &shard(&["a", "b"])), (SHARD_2, &shard(&["c"])), (INDEX, index.as_bytes())])
}

/// The messages of a refusal; every one exits with 3, and every one but the count has a remedy.
#[track_caller]
fn refusals(path: &Path) -> Vec<String> {
    let problems = Checkpoint::open(path).expect_err("this checkpoint must be refused");
    assert_eq!(problems.exit(), Exit::Input);
    for problem in problems.list() {
        assert!(
            problem.help().is_some() || matches!(problem, CheckpointError::More { .. }),
            "no remedy: {problem}"
        );
    }
    problems.list().iter().map(|problem| problem.to_string()).collect()
}

/// Opens `dir` and compares the one refusal with `expected`, where `DIR` stands for the folder.
#[track_caller]
fn refuses(dir: &Path, expected: &str) {
    let found = refusals(dir);
    assert_eq!(found, [expected.replace("DIR", &dir.display().to_string())]);
}

/// The refusal of one file `model.safetensors` with this content.
#[track_caller]
fn refuses_file(bytes: &[u8], expected: &str) {
    refuses(folder(&[("model.safetensors", bytes)]).path(), expected);
}

#[test]
fn reads_what_the_safetensors_crate_wrote() {
    let dir = tempfile::tempdir().unwrap();
    let f32s: Vec<u8> = (0..6u8).flat_map(|i| f32::from(i).to_le_bytes()).collect();
    let bytes: Vec<u8> = (0..5).collect();
    let views = [
        ("scalar", TensorView::new(safetensors::Dtype::I64, vec![], &[7, 0, 0, 0, 0, 0, 0, 0]).unwrap()),
        ("wide", TensorView::new(safetensors::Dtype::F32, vec![2, 3], &f32s).unwrap()),
        ("odd", TensorView::new(safetensors::Dtype::U8, vec![5], &bytes).unwrap()),
    ];
    let metadata = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    let path = dir.path().join("model.safetensors");
    safetensors::serialize_to_file(views, Some(metadata), &path).unwrap();

    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    assert_eq!(checkpoint.dir(), dir.path());
    assert_eq!(checkpoint.files()[0].metadata["format"], "pt");
    assert_eq!(checkpoint.files()[0].len, fs::metadata(&path).unwrap().len());
    assert_eq!(checkpoint.file_bytes(0), fs::read(&path).unwrap());
    let wide = checkpoint.get("wide").unwrap();
    assert_eq!((wide.dtype, &wide.shape, wide.bytes()), (Dtype::F32, &Shape::from([2, 3]), 24));
    assert_eq!(checkpoint.bytes(wide), f32s);
    assert_eq!(checkpoint.bytes(checkpoint.get("odd").unwrap()), bytes);
    assert_eq!(checkpoint.bytes(checkpoint.get("scalar").unwrap()), 7i64.to_le_bytes());
    assert!(checkpoint.get("absent").is_none());
    assert_eq!(checkpoint.tensors().len(), 3);
    assert!(checkpoint.tensors().is_sorted_by_key(|entry| (entry.file, entry.range.start)));
}

#[test]
fn every_known_dtype_has_the_size_that_the_safetensors_crate_gives_it() {
    for dtype in Dtype::ALL {
        let size = dtype.bytes() as usize;
        let header = format!(r#"{{"t":{{"dtype":"{dtype}","shape":[3],"data_offsets":[0,{}]}}}}"#, 3 * size);
        let bytes = raw(&header, 3 * size);
        safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let dir = folder(&[("model.safetensors", &bytes)]);
        assert_eq!(Checkpoint::open(dir.path()).unwrap().get("t").unwrap().dtype, dtype);
    }
}

#[test]
fn reads_shards_in_file_and_offset_order_through_the_index() {
    let dir = two_shards(&index(&[("c", SHARD_2), ("b", SHARD_1), ("a", SHARD_1)]));
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let order: Vec<(&str, usize)> =
        checkpoint.tensors().iter().map(|entry| (entry.name.as_str(), entry.file)).collect();
    assert_eq!(order, [("a", 0), ("b", 0), ("c", 1)]);
    assert_eq!(checkpoint.bytes(checkpoint.get("b").unwrap()), [8, 9, 10, 11, 12, 13, 14, 15]);
    assert_eq!(checkpoint.bytes(checkpoint.get("c").unwrap()), [0, 1, 2, 3, 4, 5, 6, 7]);
}

#[test]
fn reads_a_numbered_series_without_an_index() {
    let dir = folder(&[(SHARD_1, &shard(&["a"])), (SHARD_2, &shard(&["b"])), ("extra.safetensors", b"junk")]);
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    assert_eq!(checkpoint.tensors().len(), 2);
    assert_eq!(checkpoint.unread(), ["extra.safetensors"]);
}

#[test]
fn reads_the_only_file_whatever_its_name_and_a_file_given_by_its_path() {
    let dir = folder(&[("weights.safetensors", &shard(&["a"]))]);
    assert_eq!(Checkpoint::open(dir.path()).unwrap().files()[0].name, "weights.safetensors");
    let path = dir.path().join("weights.safetensors");
    let checkpoint = Checkpoint::open(&path).unwrap();
    assert_eq!((checkpoint.dir(), &checkpoint.files()[0].path), (dir.path(), &path));
}

#[test]
fn reads_named_files_without_looking_for_an_index() {
    let dir = two_shards("no index at all");
    let checkpoint = Checkpoint::open_files(dir.path(), &[SHARD_2.to_owned()]).unwrap();
    assert_eq!(checkpoint.tensors()[0].name, "c");
}

#[test]
fn released_pages_are_read_again_with_the_same_bytes() {
    let len = 3 << 20;
    let header = format!(r#"{{"t":{{"dtype":"U8","shape":[{len}],"data_offsets":[0,{len}]}}}}"#);
    let dir = folder(&[("model.safetensors", &raw(&header, len))]);
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let entry = checkpoint.get("t").unwrap();
    let before = checkpoint.bytes(entry).to_vec();
    checkpoint.prefetch(entry.file, entry.range.clone());
    checkpoint.release(entry.file, entry.range.clone());
    assert_eq!(checkpoint.bytes(entry), before);
    checkpoint.check_unchanged().unwrap();
}

#[test]
fn a_file_that_changed_after_opening_is_noticed() {
    let dir = folder(&[("model.safetensors", &shard(&["a"]))]);
    let path = dir.path().join("model.safetensors");
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let file = fs::OpenOptions::new().append(true).open(&path).unwrap();
    file.set_len(checkpoint.files()[0].len + 1).unwrap();
    let problems = checkpoint.check_unchanged().unwrap_err();
    assert_eq!(
        problems.list()[0].to_string(),
        format!("`{}` changed while it was being read: its length", path.display())
    );
    assert_eq!(problems.exit(), Exit::Input);
}

// The folder.

#[test]
fn refuses_a_folder_that_does_not_exist() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("absent");
    refuses(&path, "`DIR` does not exist");
}

#[test]
fn refuses_a_folder_without_weights() {
    refuses(folder(&[("pytorch_model.bin", b"x")]).path(), "`DIR` holds no safetensors file");
}

#[test]
fn refuses_two_sets_of_weights_without_an_index() {
    let one = shard(&["a"]);
    refuses(
        folder(&[("x.safetensors", &one), ("y.safetensors", &one)]).path(),
        "`DIR` holds several sets of weights (`x.safetensors` and `y.safetensors`) and no index that says which to read",
    );
    refuses(
        folder(&[("model.safetensors", &one), (SHARD_1, &one), (SHARD_2, &one)]).path(),
        "`DIR` holds several sets of weights (`model.safetensors` and `model-*-of-00002.safetensors`) \
         and no index that says which to read",
    );
}

#[test]
fn refuses_a_gap_in_a_numbered_series() {
    refuses(
        folder(&[(SHARD_2, &shard(&["b"]))]).path(),
        "`DIR/model-00001-of-00002.safetensors` is missing: 1 of 2 numbered files are there",
    );
}

#[test]
fn refuses_a_stray_model_file() {
    let dir = two_shards(&index(&[("a", SHARD_1), ("b", SHARD_1), ("c", SHARD_2)]));
    fs::write(dir.path().join("model.safetensors"), shard(&["old"])).unwrap();
    refuses(
        dir.path(),
        "`DIR/model.safetensors` would be loaded by tools that read every `model*.safetensors`, \
         but the index does not list it",
    );
}

#[test]
fn refuses_a_link_in_the_folder_by_name() {
    let target = folder(&[("blob", &shard(&["a"]))]);
    let dir = tempfile::tempdir().unwrap();
    symlink(target.path().join("blob"), dir.path().join("model.safetensors")).unwrap();
    refuses(
        dir.path(),
        "`DIR/model.safetensors` is a symbolic link, and links are not followed in a source folder",
    );
}

#[test]
fn refuses_a_shard_that_is_a_folder() {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir(dir.path().join("model.safetensors")).unwrap();
    refuses(dir.path(), "`DIR/model.safetensors` is neither a folder nor a regular file");
}

/// A snapshot as the Hugging Face cache lays it out, linking to `target`.
fn snapshot(target: &str) -> (TempDir, std::path::PathBuf) {
    let cache = tempfile::tempdir().unwrap();
    let repo = cache.path().join("models--org--name");
    let commit = repo.join("snapshots").join("0123456789abcdef0123456789abcdef01234567");
    fs::create_dir_all(&commit).unwrap();
    fs::create_dir_all(repo.join("blobs")).unwrap();
    fs::write(repo.join("blobs/aa"), shard(&["a"])).unwrap();
    fs::write(cache.path().join("outside"), shard(&["a"])).unwrap();
    symlink(target, commit.join("model.safetensors")).unwrap();
    (cache, commit)
}

#[test]
fn follows_the_links_of_a_hub_snapshot_inside_its_repository_only() {
    let (_cache, dir) = snapshot("../../blobs/aa");
    let links = Links::of_folder(&dir);
    assert_ne!(links, Links::Refuse);
    assert_eq!(Checkpoint::open_with(&dir, &links).unwrap().tensors().len(), 1);

    let (_cache, dir) = snapshot("../../../outside");
    let problems = Checkpoint::open_with(&dir, &Links::of_folder(&dir)).unwrap_err();
    assert!(
        matches!(&problems.list()[0], CheckpointError::LinkEscapes { target, .. } if target.ends_with("outside")),
        "{problems}"
    );
    assert_eq!(Links::of_folder(dir.parent().unwrap()), Links::Refuse);
}

// The index.

#[test]
fn refuses_an_index_path_that_leaves_the_folder() {
    for bad in ["../model.safetensors", "/tmp/model.safetensors", "sub/model.safetensors", "model.bin"] {
        refuses(
            two_shards(&index(&[("a", SHARD_1), ("b", SHARD_1), ("c", bad)])).path(),
            &format!(
                "`DIR/{INDEX}`: tensor `c` is said to be in `{bad}`, which is not a plain `*.safetensors` file name"
            ),
        );
    }
}

#[test]
fn refuses_an_index_that_names_a_missing_file() {
    refuses(
        two_shards(&index(&[("a", SHARD_1), ("b", SHARD_1), ("c", SHARD_2), ("d", "gone.safetensors")]))
            .path(),
        &format!("`DIR/gone.safetensors` is missing: `{INDEX}` says that it holds 1 tensor"),
    );
}

#[test]
fn refuses_a_tensor_that_only_the_index_knows() {
    refuses(
        two_shards(&index(&[("a", SHARD_1), ("b", SHARD_1), ("c", SHARD_2), ("d", SHARD_2)])).path(),
        &format!("`DIR/{SHARD_2}`: tensor `d` is not there, but `DIR/{INDEX}` says it is"),
    );
}

#[test]
fn refuses_a_tensor_that_the_index_does_not_list() {
    refuses(
        two_shards(&index(&[("a", SHARD_1), ("c", SHARD_2)])).path(),
        &format!("`DIR/{SHARD_1}`: tensor `b` is not listed for this file in `DIR/{INDEX}`"),
    );
}

#[test]
fn refuses_a_malformed_index() {
    let needed = "needed an object whose `weight_map` maps tensor names to file names";
    for (text, found) in [
        ("[1]", "a list"),
        ("{}", "no `weight_map`"),
        (r#"{"weight_map":null}"#, "null as `weight_map`"),
        (r#"{"weight_map":{},"weight_map":{}}"#, "`weight_map` twice"),
    ] {
        refuses(two_shards(text).path(), &format!("`DIR/{INDEX}` is not an index: found {found}, {needed}"));
    }
    refuses(
        two_shards(r#"{"weight_map":{}}"#).path(),
        &format!("`DIR/{INDEX}` is not an index: found an empty `weight_map`, needed at least one tensor"),
    );
    refuses(
        two_shards(r#"{"weight_map":{"a":1}}"#).path(),
        &format!("`DIR/{INDEX}` is not an index: found a number as the file of `a`, needed a file name"),
    );
    assert!(refusals(two_shards(r#"{"weight_map":"#).path())[0].contains("text that is not JSON"));
}

#[test]
fn refuses_a_tensor_that_the_index_lists_twice() {
    refuses(
        two_shards(&index(&[("a", SHARD_1), ("b", SHARD_1), ("c", SHARD_2), ("c", SHARD_1)])).path(),
        &format!("`DIR/{INDEX}` lists tensor `c` twice"),
    );
}

#[test]
fn refuses_a_tensor_in_two_shards() {
    refuses(
        folder(&[(SHARD_1, &shard(&["a", "b"])), (SHARD_2, &shard(&["b"]))]).path(),
        &format!("tensor `b` is both in `DIR/{SHARD_1}` and in `DIR/{SHARD_2}`"),
    );
}

// The file.

#[test]
fn refuses_a_file_too_short_for_a_length() {
    let expected = |n| {
        format!(
            "`DIR/model.safetensors` is {n} bytes long; a safetensors file has at least 8 bytes and a header"
        )
    };
    refuses_file(b"", &expected(0));
    refuses_file(&[0; 7], &expected(7));
}

#[test]
fn refuses_a_header_longer_than_the_file() {
    let mut bytes = 1000u64.to_le_bytes().to_vec();
    bytes.extend_from_slice(b"{}");
    refuses_file(
        &bytes,
        "`DIR/model.safetensors`: the header is said to be 1000 bytes long, but only 2 bytes follow",
    );
}

#[test]
fn refuses_a_header_over_the_limit_of_the_format() {
    let mut bytes = 100_000_001u64.to_le_bytes().to_vec();
    bytes.extend_from_slice(b"{}");
    refuses_file(
        &bytes,
        "`DIR/model.safetensors`: the header is said to be 100000001 bytes long, over the format's limit of 100000000",
    );
}

#[test]
fn refuses_a_header_that_is_not_utf8() {
    let mut bytes = raw(r#"{"a":1}"#, 0);
    bytes[10] = 0xff;
    refuses_file(&bytes, "`DIR/model.safetensors`: the header is not UTF-8 from its byte 2 on");
}

#[test]
fn refuses_a_header_that_is_not_a_json_object() {
    let object = "but must be a JSON object that starts at its first byte";
    for (header, found) in [("[]", "a list"), ("", "empty"), (" {}", "indented"), ("7", "a number")] {
        refuses_file(&raw(header, 0), &format!("`DIR/model.safetensors`: the header is {found}, {object}"));
    }
    let dir = folder(&[("model.safetensors", &raw(r#"{"a": "#, 0))]);
    assert!(refusals(dir.path())[0].contains("the header is not JSON: EOF while parsing"));
}

#[test]
fn refuses_a_tensor_twice_in_one_header() {
    let t = r#""t":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}"#;
    refuses_file(
        &raw(&format!("{{{t},{t}}}"), 4),
        "`DIR/model.safetensors`: tensor `t` occurs twice in the header",
    );
}

#[test]
fn refuses_metadata_that_is_not_a_map_of_strings() {
    let t = r#""t":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}"#;
    for (metadata, found) in [
        ("null", "null"),
        ("[]", "a list"),
        (r#"{"a":1}"#, "a number for `a`"),
        (r#"{"a":"x","a":"y"}"#, "`a` twice"),
    ] {
        refuses_file(
            &raw(&format!(r#"{{"__metadata__":{metadata},{t}}}"#), 4),
            &format!("`DIR/model.safetensors`: `__metadata__` must map strings to strings, found {found}"),
        );
    }
}

/// The refusal of a file with one entry `t` and so many data bytes.
#[track_caller]
fn refuses_entry(entry: &str, data: usize, expected: &str) {
    refuses_file(
        &raw(&format!(r#"{{"t":{entry}}}"#), data),
        &format!("`DIR/model.safetensors`: tensor `t`{expected}"),
    );
}

#[test]
fn refuses_a_malformed_entry() {
    let object = "an object with `dtype`, `shape` and `data_offsets`, each once";
    let shape = "`shape`: a list of whole numbers";
    let offsets = "`data_offsets`: a list of two whole numbers";
    for (entry, found, needed) in [
        ("3", "a number", object),
        (r#"{"shape":[4],"data_offsets":[0,4]}"#, "no `dtype`", object),
        (r#"{"dtype":"U8","dtype":"U8","shape":[4],"data_offsets":[0,4]}"#, "`dtype` twice", object),
        (r#"{"dtype":"U8","shape":[4],"data_offsets":[0,4],"strides":[1]}"#, "the key `strides`", object),
        (r#"{"dtype":8,"shape":[4],"data_offsets":[0,4]}"#, "a number as `dtype`", "a string"),
        (r#"{"dtype":"U8","data_offsets":[0,4]}"#, "no `shape`", shape),
        (r#"{"dtype":"U8","shape":4,"data_offsets":[0,4]}"#, "a number as `shape`", shape),
        (r#"{"dtype":"U8","shape":[-4],"data_offsets":[0,4]}"#, "a negative number in `shape`", shape),
        (r#"{"dtype":"U8","shape":[true],"data_offsets":[0,4]}"#, "a boolean in `shape`", shape),
        (
            r#"{"dtype":"U8","shape":[4.0],"data_offsets":[0,4]}"#,
            "a number that is not a 64-bit whole number in `shape`",
            shape,
        ),
        (r#"{"dtype":"U8","shape":[4],"data_offsets":[0]}"#, "1 numbers as `data_offsets`", offsets),
        (r#"{"dtype":"U8","shape":[4],"data_offsets":["0",4]}"#, "a string in `data_offsets`", offsets),
    ] {
        refuses_entry(entry, 4, &format!(": found {found}, needed {needed}"));
    }
}

#[test]
fn refuses_an_unknown_dtype() {
    let dir =
        folder(&[("model.safetensors", &raw(r#"{"t":{"dtype":"F4","shape":[8],"data_offsets":[0,4]}}"#, 4))]);
    let found = refusals(dir.path());
    assert_eq!(found.len(), 1);
    assert!(found[0].contains("tensor `t` has dtype `F4`, which is not one of `BOOL`, "), "{found:?}");
}

#[test]
fn refuses_a_tensor_without_elements() {
    refuses_file(
        &raw(
            r#"{"t":{"dtype":"U8","shape":[4,0],"data_offsets":[0,0]},"u":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}"#,
            1,
        ),
        "`DIR/model.safetensors`: tensor `t` of shape [4, 0] has no elements",
    );
}

#[test]
fn refuses_a_shape_whose_bytes_overflow() {
    for dims in ["4294967296,4294967296", "4611686018427387904"] {
        refuses_entry(
            &format!(r#"{{"dtype":"F32","shape":[{dims}],"data_offsets":[0,4]}}"#),
            4,
            &format!(" of F32 [{}] needs more bytes than 64 bits can count", dims.replace(',', ", ")),
        );
    }
}

#[test]
fn refuses_offsets_that_run_backwards() {
    let dir =
        folder(&[("model.safetensors", &raw(r#"{"t":{"dtype":"U8","shape":[4],"data_offsets":[4,0]}}"#, 4))]);
    let found = refusals(dir.path());
    assert!(found[0].ends_with("tensor `t` begins at 4, after its end 0"), "{found:?}");
}

#[test]
fn refuses_a_size_that_differs_from_dtype_times_shape() {
    refuses_entry(
        r#"{"dtype":"BF16","shape":[2,3],"data_offsets":[0,10]}"#,
        10,
        " holds 10 bytes, but BF16 [2, 3] needs 12",
    );
}

#[test]
fn refuses_an_offset_out_of_range_beside_other_faults() {
    let header = r#"{"t":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"u":{"dtype":"U8","shape":[4],"data_offsets":[90,94]}}"#;
    let dir = folder(&[("model.safetensors", &raw(header, 8))]);
    let found = refusals(dir.path());
    assert_eq!(found.len(), 2, "{found:?}");
    assert!(found[0].ends_with("86 bytes before tensor `u`, from 4 to 90, belong to no tensor"), "{found:?}");
    assert!(found[1].ends_with("tensor `u` ends at 94, but the file has only 8 bytes of data"), "{found:?}");
}

#[test]
fn refuses_overlapping_tensors() {
    refuses_file(
        &raw(
            r#"{"t":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"u":{"dtype":"U8","shape":[4],"data_offsets":[2,6]}}"#,
            6,
        ),
        "`DIR/model.safetensors`: tensor `u` begins at 2, inside `t`, which ends at 4",
    );
}

#[test]
fn refuses_a_hole_between_tensors_and_before_the_first() {
    refuses_file(
        &raw(r#"{"t":{"dtype":"U8","shape":[4],"data_offsets":[2,6]}}"#, 6),
        "`DIR/model.safetensors`: 2 bytes before tensor `t`, from 0 to 2, belong to no tensor",
    );
    refuses_file(
        &raw(
            r#"{"t":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"u":{"dtype":"U8","shape":[4],"data_offsets":[9,13]}}"#,
            13,
        ),
        "`DIR/model.safetensors`: 5 bytes before tensor `u`, from 4 to 9, belong to no tensor",
    );
}

#[test]
fn refuses_bytes_after_the_last_tensor() {
    refuses_file(
        &raw(r#"{"t":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}"#, 7),
        "`DIR/model.safetensors`: 3 bytes after the last tensor `t` belong to no tensor",
    );
}

#[test]
fn refuses_a_truncated_shard_and_says_how_much_is_missing() {
    let mut bytes = shard(&["a", "b"]);
    let needed = bytes.len();
    bytes.truncate(needed - 5);
    refuses_file(
        &bytes,
        &format!(
            "`DIR/model.safetensors` is truncated: its header describes {needed} bytes, the file has {}, \
             so 5 (5 B) are missing",
            needed - 5
        ),
    );
}

#[test]
fn refuses_a_file_without_tensors() {
    refuses_file(&raw(r#"{"__metadata__":{"format":"pt"}}"#, 0), "`DIR/model.safetensors` holds no tensor");
}

#[test]
fn reports_the_problems_of_every_file_at_once_and_counts_those_past_the_limit() {
    let bad = raw(r#"{"t":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}"#, 7);
    let dir = folder(&[(SHARD_1, &bad), (SHARD_2, b"short")]);
    let found = refusals(dir.path());
    assert!(found[0].contains(SHARD_1) && found[1].contains(SHARD_2), "{found:?}");

    let names: Vec<String> = (0..REPORTED + 7).map(|i| format!("extra{i:02}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let dir = folder(&[
        ("model.safetensors", &shard(&names)),
        (INDEX, index(&[("extra00", "model.safetensors")]).as_bytes()),
    ]);
    let found = refusals(dir.path());
    assert_eq!(found.len(), REPORTED + 1);
    assert_eq!(found[REPORTED], "and 6 more");
}
