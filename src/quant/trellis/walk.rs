//! Two passes around a ring.
//!
//! A node is what two neighbours' states share: L − k bits. The first pass, free at both ends, runs over w weights to each
//! side of the seam and finds the node at the seam; the second runs from it around the ring and is walked back from
//! it, so its path closes. Source: QTIP, algorithm 4; there w = T / 2.

/// Costs of nodes, weight by weight.
pub(super) trait Costs {
    /// Runs over `steps` weights from `position` of the ring on, beginning at `start` or anywhere.
    ///
    /// [`Costs::back`] must then know the steps from `keep` on.
    fn forward(&mut self, position: usize, steps: usize, start: Option<u32>, keep: usize);

    /// The cheapest node after the last step; the smallest of equals.
    fn cheapest(&self) -> u32;

    /// Whether the cost of `node` after the last step is one that other paths may have too without being told apart.
    fn is_saturated(&self, node: u32) -> bool;

    /// Walks back from `node` after the last step to the costs before step `first`, through all positions from 0 on.
    ///
    /// Fills in the state of each step, and gives the node before them. Of equal costs, the smallest state.
    fn back(&self, first: usize, node: u32, states: &mut [u32]) -> u32;
}

/// Fills in the states of a ring, and gives the node at the seam.
///
/// `None` if costs are saturated at its end: a path walked back along them need not close. What `states` holds is
/// unspecified then.
pub(super) fn around(costs: &mut impl Costs, window: usize, states: &mut [u32]) -> Option<u32> {
    let len = states.len();
    costs.forward(len - window, 2 * window, None, window);
    let seam = costs.back(window, costs.cheapest(), &mut states[..window]);
    costs.forward(0, len, Some(seam), 0);
    if costs.is_saturated(seam) {
        return None;
    }
    let end = costs.back(0, seam, states);
    assert_eq!(end, seam, "a path that does not close: the search is wrong");
    Some(seam)
}
