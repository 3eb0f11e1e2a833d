//! JSON that keeps what `serde_json::Value` forgets: a key that occurs twice.

use std::fmt;

use serde::de::{Deserialize, Deserializer, Error, MapAccess, SeqAccess, Visitor};

/// A JSON value. Objects keep every pair in the order written.
#[derive(Debug)]
pub(super) enum Node {
    Map(Vec<(String, Node)>),
    List(Vec<Node>),
    Text(String),
    /// A whole number from 0 to 2^64 - 1.
    Count(u64),
    /// A value that no header or index may hold, in words.
    Other(&'static str),
}

impl Node {
    /// What this is, in words.
    pub fn kind(&self) -> &'static str {
        match self {
            Node::Map(_) => "an object",
            Node::List(_) => "a list",
            Node::Text(_) => "a string",
            Node::Count(_) => "a number",
            Node::Other(kind) => kind,
        }
    }
}

impl<'de> Deserialize<'de> for Node {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Any;
        impl<'de> Visitor<'de> for Any {
            type Value = Node;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("JSON")
            }
            fn visit_bool<E: Error>(self, _: bool) -> Result<Node, E> {
                Ok(Node::Other("a boolean"))
            }
            fn visit_i64<E: Error>(self, _: i64) -> Result<Node, E> {
                Ok(Node::Other("a negative number"))
            }
            fn visit_u64<E: Error>(self, value: u64) -> Result<Node, E> {
                Ok(Node::Count(value))
            }
            fn visit_f64<E: Error>(self, _: f64) -> Result<Node, E> {
                Ok(Node::Other("a number that is not a 64-bit whole number"))
            }
            fn visit_str<E: Error>(self, text: &str) -> Result<Node, E> {
                Ok(Node::Text(text.to_owned()))
            }
            fn visit_unit<E: Error>(self) -> Result<Node, E> {
                Ok(Node::Other("null"))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut access: A) -> Result<Node, A::Error> {
                let mut list = Vec::new();
                while let Some(node) = access.next_element()? {
                    list.push(node);
                }
                Ok(Node::List(list))
            }
            fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Node, A::Error> {
                let mut pairs = Vec::new();
                while let Some(pair) = access.next_entry()? {
                    pairs.push(pair);
                }
                Ok(Node::Map(pairs))
            }
        }
        deserializer.deserialize_any(Any)
    }
}
