//! What rotations ask of the values that they are given.

/// Panics unless `values` are rows of `row_elements` values that are runs of n.
pub(super) fn assert_in_rows(values: &[f32], row_elements: usize, n: usize) {
    assert!(
        row_elements.is_multiple_of(n) && (row_elements > 0 || values.is_empty()),
        "rows of {row_elements} values are not runs of {n}"
    );
    assert!(
        row_elements == 0 || values.len().is_multiple_of(row_elements),
        "{} values are not rows of {row_elements}",
        values.len()
    );
}

/// Panics unless `values`, of which there are some, are rows of `row_elements` values, of which n each make a run.
pub(super) fn assert_of_rows(values: &[f32], row_elements: usize, n: usize) {
    assert!(
        row_elements > 0 && values.len().is_multiple_of(row_elements),
        "{} values are not rows of {row_elements}",
        values.len()
    );
    let rows = values.len() / row_elements;
    assert!(rows.is_multiple_of(n), "{rows} rows are not runs of {n}");
}
