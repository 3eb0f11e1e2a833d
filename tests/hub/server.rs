//! A hub on the loopback interface that speaks the endpoints a download uses, and can misbehave.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use sha1::Digest as _;

pub const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
pub const REPO: &str = "org/tiny-model";

/// One request as it came.
#[derive(Debug, Clone)]
pub struct Request {
    pub path: String,
    pub range: Option<String>,
    pub token: Option<String>,
}

/// How the server misbehaves.
#[derive(Default)]
pub struct Manners {
    /// Cut the next so many content answers of this file after half of what they should send.
    pub cut: BTreeMap<String, usize>,
    /// Answer so many requests for content with 503.
    pub busy: usize,
    /// Promise this ETag for a file instead of the right one.
    pub etag: BTreeMap<String, String>,
    /// Answer every request with this status.
    pub status: Option<u16>,
    /// Say that the revision is this commit.
    pub commit: Option<String>,
    /// Send the headers of this file's content, then nothing.
    pub silent: Option<String>,
}

struct State {
    files: BTreeMap<String, Vec<u8>>,
    manners: Mutex<Manners>,
    requests: Mutex<Vec<Request>>,
    stopped: AtomicBool,
    address: SocketAddr,
}

pub struct Server {
    state: Arc<State>,
    listener: Option<std::thread::JoinHandle<()>>,
}

impl Server {
    pub fn start(files: BTreeMap<String, Vec<u8>>, manners: Manners) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let state = Arc::new(State {
            files,
            manners: Mutex::new(manners),
            requests: Mutex::default(),
            stopped: AtomicBool::new(false),
            address: listener.local_addr().unwrap(),
        });
        let shared = Arc::clone(&state);
        let listener = std::thread::spawn(move || {
            for stream in listener.incoming() {
                if shared.stopped.load(Ordering::SeqCst) {
                    break;
                }
                let shared = Arc::clone(&shared);
                std::thread::spawn(move || {
                    // A client that hangs up is no concern of the server's.
                    let _ = serve(&shared, stream.unwrap());
                });
            }
        });
        Self { state, listener: Some(listener) }
    }

    pub fn endpoint(&self) -> String {
        format!("http://{}", self.state.address)
    }

    pub fn requests(&self) -> Vec<Request> {
        self.state.requests.lock().unwrap().clone()
    }

    pub fn manners(&self) -> std::sync::MutexGuard<'_, Manners> {
        self.state.manners.lock().unwrap()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.state.stopped.store(true, Ordering::SeqCst);
        let _ = TcpStream::connect(self.state.address);
        self.listener.take().unwrap().join().unwrap();
    }
}

/// Large files are those with weights, as on the hub.
pub fn etag(name: &str, content: &[u8]) -> String {
    let hex = |bytes: &[u8]| bytes.iter().map(|b| format!("{b:02x}")).collect();
    if name.ends_with(".safetensors") {
        hex(&sha2::Sha256::digest(content))
    } else {
        let mut git = sha1::Sha1::new();
        git.update(format!("blob {}\0", content.len()));
        git.update(content);
        hex(&git.finalize())
    }
}

fn serve(state: &State, mut stream: TcpStream) -> std::io::Result<()> {
    stream.set_read_timeout(Some(Duration::from_secs(10)))?;
    let mut lines = BufReader::new(stream.try_clone()?).lines();
    let first = lines.next().unwrap_or_else(|| Ok(String::new()))?;
    let path = first.split(' ').nth(1).unwrap_or_default().to_owned();
    let mut request = Request { path: path.clone(), range: None, token: None };
    for line in lines {
        let line = line?;
        match line.split_once(':').map(|(key, value)| (key.to_ascii_lowercase(), value.trim().to_owned())) {
            Some((key, value)) if key == "range" => request.range = Some(value),
            Some((key, value)) if key == "authorization" => request.token = Some(value),
            Some(_) => {}
            None => break,
        }
    }
    let range = request.range.clone();
    state.requests.lock().unwrap().push(request);

    let mut manners = state.manners.lock().unwrap();
    if let Some(status) = manners.status {
        return answer(&mut stream, status, &[], b"{\"error\":\"no\"}");
    }
    let commit = manners.commit.clone().unwrap_or_else(|| COMMIT.to_owned());
    if path == format!("/api/models/{REPO}/revision/{COMMIT}") {
        let names: Vec<String> =
            state.files.keys().map(|name| format!("{{\"rfilename\":\"{name}\"}}")).collect();
        let body = format!("{{\"sha\":\"{commit}\",\"siblings\":[{}]}}", names.join(","));
        return answer(&mut stream, 200, &[("Content-Type", "application/json".into())], body.as_bytes());
    }
    let (name, redirected) = match path.strip_prefix("/cdn/") {
        Some(name) => (name, true),
        None => match path.strip_prefix(&format!("/{REPO}/resolve/{COMMIT}/")) {
            Some(name) => (name, false),
            None => return answer(&mut stream, 404, &[], b"Not Found"),
        },
    };
    let Some(content) = state.files.get(name) else {
        return answer(&mut stream, 404, &[], b"Entry not found");
    };
    let etag = format!("\"{}\"", manners.etag.get(name).cloned().unwrap_or_else(|| etag(name, content)));
    let mut headers = vec![("X-Repo-Commit", commit)];
    if name.ends_with(".safetensors") && !redirected {
        // Large files lie elsewhere; their digest is in the redirect.
        headers.push(("X-Linked-ETag", etag));
        headers.push(("ETag", "\"of-the-redirect\"".into()));
        headers.push(("Location", format!("http://{}/cdn/{name}", state.address)));
        return answer(&mut stream, 302, &headers, b"");
    }
    headers.push(("ETag", etag));
    let (start, end) = bounds(range.as_deref(), content.len());
    if start > end || end >= content.len() {
        return answer(&mut stream, 416, &headers, b"");
    }
    let body = &content[start..=end];
    headers.push(("Content-Range", format!("bytes {start}-{end}/{}", content.len())));
    let is_content = range.as_deref() != Some("bytes=0-0");
    if is_content && manners.busy > 0 {
        manners.busy -= 1;
        return answer(&mut stream, 503, &[], b"");
    }
    let mut sent = body.len();
    let mut hold = false;
    if is_content {
        if let Some(left) = manners.cut.get_mut(name).filter(|left| **left > 0) {
            *left -= 1;
            sent /= 2;
        }
        hold = manners.silent.as_deref() == Some(name);
    }
    drop(manners);
    headers.push(("Content-Length", body.len().to_string()));
    head(&mut stream, 206, &headers)?;
    if hold {
        // Until the client gives up.
        let _ = stream.read(&mut [0]);
        return Ok(());
    }
    stream.write_all(&body[..sent])?;
    stream.shutdown(std::net::Shutdown::Both)
}

fn bounds(range: Option<&str>, len: usize) -> (usize, usize) {
    let Some((start, end)) = range.and_then(|r| r.strip_prefix("bytes=")?.split_once('-')) else {
        return (0, len - 1);
    };
    (start.parse().unwrap(), end.parse().unwrap_or(len - 1))
}

fn head(stream: &mut TcpStream, status: u16, headers: &[(&str, String)]) -> std::io::Result<()> {
    write!(stream, "HTTP/1.1 {status} status\r\nConnection: close\r\n")?;
    for (key, value) in headers {
        write!(stream, "{key}: {value}\r\n")?;
    }
    stream.write_all(b"\r\n")
}

fn answer(
    stream: &mut TcpStream,
    status: u16,
    headers: &[(&str, String)],
    body: &[u8],
) -> std::io::Result<()> {
    let mut headers = headers.to_vec();
    headers.push(("Content-Length", body.len().to_string()));
    head(stream, status, &headers)?;
    stream.write_all(body)
}
