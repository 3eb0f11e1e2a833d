//! One page of everything that a database of results holds.
//!
//! ```text
//! eval.db ─► data: what is shown ─► page: HTML, with charts of svg ─► one file
//! ```
//!
//! The page needs no network, no script and no other file; light or dark as the reader's system is. The same database
//! gives the same bytes: there is no clock in it, times are those of the runs. Charts show nothing that a table
//! beside them does not.

pub mod data;
pub mod html;
mod number;
mod page;
mod svg;

pub use data::{Data, collect};
pub use page::{is_page, page};
