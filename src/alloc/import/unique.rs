//! JSON in which no key may occur twice: of two costs of one module, neither is to be believed.

use std::fmt;

use serde::de::{Deserialize, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::Value;

/// JSON without a key that occurs twice.
pub(super) struct Unique(pub Value);

impl<'de> Deserialize<'de> for Unique {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Any;
        impl<'de> Visitor<'de> for Any {
            type Value = Value;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("JSON")
            }
            fn visit_bool<E: Error>(self, value: bool) -> Result<Value, E> {
                Ok(value.into())
            }
            fn visit_i64<E: Error>(self, value: i64) -> Result<Value, E> {
                Ok(value.into())
            }
            fn visit_u64<E: Error>(self, value: u64) -> Result<Value, E> {
                Ok(value.into())
            }
            fn visit_f64<E: Error>(self, value: f64) -> Result<Value, E> {
                Ok(value.into())
            }
            fn visit_str<E: Error>(self, text: &str) -> Result<Value, E> {
                Ok(text.into())
            }
            fn visit_unit<E: Error>(self) -> Result<Value, E> {
                Ok(Value::Null)
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut access: A) -> Result<Value, A::Error> {
                let mut list = Vec::new();
                while let Some(Unique(value)) = access.next_element()? {
                    list.push(value);
                }
                Ok(list.into())
            }
            fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Value, A::Error> {
                let mut map = serde_json::Map::new();
                while let Some((key, Unique(value))) = access.next_entry::<String, Unique>()? {
                    if map.contains_key(&key) {
                        return Err(Error::custom(format_args!("`{key}` occurs twice")));
                    }
                    map.insert(key, value);
                }
                Ok(map.into())
            }
        }
        deserializer.deserialize_any(Any).map(Unique)
    }
}
