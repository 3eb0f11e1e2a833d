"""Renders chat templates with transformers and Jinja2.

Each file: `templates` by name, and `cases`: name, template (its name), special (tokens), messages, tools, variables, add_generation_prompt, now (seconds since
1970, UTC), and one of expected (the text), raises (what `raise_exception` said), fails (another error).
The templates are written for this project after the constructs of published ones.
"""

import datetime
import json
import pathlib

import jinja2
from transformers.utils import chat_template_utils
from transformers.utils.chat_template_utils import _normalize_chat_messages, render_jinja_template

NOW = 1721999045
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}


class Clock(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return datetime.datetime(1970, 1, 1) + datetime.timedelta(seconds=NOW)


chat_template_utils.datetime = Clock

U = {"role": "user", "content": "Hi there!"}
A = {"role": "assistant", "content": "Hello. How can I help?"}
S = {"role": "system", "content": "Be brief."}
TURNS = [S, U, A, {"role": "user", "content": " and 3+3? "}]
UNICODE = [{"role": "user", "content": "naïve 今天 \U0001f469\u200d\U0001f4bb <b>\"q\" & 'a'</b> \u2028 \x7f \x01 \t\n\\ end"}]
PARTS = [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": " two"}]}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a town; <now> & \"later\" — °C",
        "parameters": {
            "type": "object",
            "properties": {
                "town": {"type": "string", "description": "Name"},
                "days": {"type": "integer", "minimum": 1, "default": 1},
                "items": {"type": "array", "items": {"type": ["number", "null"]}, "enum": [1, 2.5, 1e20, 1e-7, None, True, False]},
            },
            "required": ["town"],
        },
    },
}
EMPTY = {"type": "function", "function": {"name": "now", "description": "", "parameters": {"type": "object", "properties": {}, "required": []}}}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"type": "function", "id": "call00001", "function": {"name": "get_weather", "arguments": {"town": "Zürich", "days": 2, "x": {"b": [], "a": {}}}}}
    ],
}
TOOL_TURNS = [U, CALL, {"role": "tool", "name": "get_weather", "tool_call_id": "call00001", "content": "{\"t\": 21}"}, {"role": "assistant", "content": "21 °C."}, {"role": "user", "content": "Thanks"}]
THINK = [U, {"role": "assistant", "content": "<think>\nplan\n</think>\n\n4"}, {"role": "user", "content": "more"}, {"role": "assistant", "content": "x", "reasoning_content": " because \n"}]

constructs, families = [], []


def add(to, name, template, messages=None, tools=None, gen=True, **variables):
    to.append(dict(name=name, template=template, special=SPECIAL, messages=messages or [U], tools=tools or [],
                   variables=variables, add_generation_prompt=gen, now=NOW))


def c(name, template, messages=None, **kw):
    add(constructs, name, template, messages, **kw)


def f(name, template, messages=None, **kw):
    add(families, name, template, messages, **kw)


# tojson
c("tojson nested", "{{ tools | tojson }}", tools=[WEATHER, EMPTY])
c("tojson indent", "{{ tools[0] | tojson(indent=4) }}\n{{ tools | tojson(indent=2) }}", tools=[WEATHER, EMPTY])
c("tojson unicode", "{{ messages | tojson }}", UNICODE)
c("tojson ascii", "{{ messages | tojson(ensure_ascii=True) }} {{ messages[0] | tojson(true) }}", UNICODE)
c("tojson separators", "{{ tools[0] | tojson(separators=(',', ':')) }} {{ tools | tojson(indent=1, separators=['; ', '=']) }}", tools=[WEATHER])
c("tojson sorted", "{{ tools | tojson(sort_keys=true) }} {{ {'b': 1, 'a': {'d': 1, 'c': 2}} | tojson(sort_keys=True, indent=0) }}", tools=[WEATHER])
c("tojson indent of text", "{{ {'a': [1, {'b': []}], 'c': {}} | tojson(indent='--') }}{{ [] | tojson(indent=2) }}{{ {} | tojson(indent=2) }}")
c("tojson numbers", "{{ [0, -1, 1.0, -0.0, 0.1, 1e15, 1e16, 1.5e300, 0.0001, 0.00001, 123456789012345678, n, big] | tojson }}", n=0.30000000000000004, big=18446744073709551615)
c("tojson scalars", "{{ none | tojson }} {{ true | tojson }} {{ 'x\"y' | tojson }} {{ 3 | tojson }} {{ (1, 'a') | tojson }} {{ {1: 2, true: 3, none: 4, 1.5: 5} | tojson }}")
c("tojson keys keep order", "{{ {'z': 1, 'a': 2, 'm': {'y': 1, 'b': 2}} | tojson }} {{ dict(z=1, a=2) | tojson }}")
c("tojson of undefined", "{{ nothing | tojson }}")
c("tojson of slices and lists", "{{ messages[1:] | tojson }} {{ messages[::-1] | map(attribute='role') | list | tojson }}", TURNS)
c("json by hand", "{{ '{\"name\": \"' + tools[0].function.name + '\"}' }}", tools=[WEATHER])

# what is printed
c("printing values", "{{ true }} {{ none }} {{ 1.0 }} {{ 1e16 }} {{ 1e-5 }} {{ [1, 'a', none, true, 2.5] }} {{ {'a': 'b', 'c': [\"it's\"]} }} {{ (1,) }} {{ (1, 'x') }} {{ nothing }}|")
c("printing json values", "{{ tools[0].function.parameters.properties['items'].enum }} {{ tools[0].function.parameters }}", tools=[WEATHER])
c("concatenating", "{{ 'a' ~ 1 ~ true ~ none ~ 1.5 ~ [1, 'b'] ~ nothing }} {{ 'ab' 'cd' }} {{ 'x' * 3 }} {{ [1] + [2] }} {{ 'n' + 1 | string }}")
c("string filter", "{{ true | string }} {{ none | string }} {{ [1, 'a'] | string }} {{ 2.0 | string }} {{ {'a': 1} | string }}")
c("literals", "{{ 'a\\n\\t\\'\\\\b' }} {{ \"\\u00e9 \\x41 \\\"q\\\"\" }} {{ 1_000 }} {{ 0x1f }} {{ 0b101 }} {{ 1.5e3 }} {{ True and not False }} {{ None is none }}")
c("arithmetic", "{{ 7 // 2 }} {{ -7 // 2 }} {{ 7 % 3 }} {{ -7 % 3 }} {{ 7 / 2 }} {{ 4 / 2 }} {{ 2 ** 10 }} {{ 2 ** -1 }} {{ 1 + 2 * 3 }} {{ -2 ** 2 }} {{ 10 % 4 == 2 }}")
c("comparisons", "{{ 1 < 2 < 3 }} {{ 3 > 2 > 2 }} {{ 'a' < 'b' }} {{ 1 == 1.0 }} {{ '1' == 1 }} {{ [1] == [1] }} {{ {'a': 1} == {'a': 1} }} {{ true == 1 }} {{ none == false }} {{ 'a' in 'cat' }} {{ 'x' not in ['x'] }} {{ 'role' in messages[0] }}")
c("truth", "{% for x in ['', 'a', 0, 1, 0.0, [], [0], {}, {'a': 1}, none, true, nothing] %}{{ 1 if x else 0 }}{% endfor %} {{ '' or 'default' }} {{ 'a' and 'b' }} {{ none or 0 or [] }}")
c("conditional without else", "[{{ 'x' if false }}]{{ ('x' if false) is defined }}")

# whitespace
c("trim and lstrip blocks", "start\n  {% if true %}\n    body\n  {% endif %}\n  {# note #}\nend\n")
c("signs", "a  {%- if true -%}  b  {%- endif -%}  c {{- ' d' -}}  e\n{%+ if true +%}\nf\n{% endif %}\n  {%+ if true %}g{% endif %}\n")
c("trailing newlines", "x\n\n")
c("one trailing newline", "x\n")
c("comments", "a\n{# one #}\n{#- two -#}\n  b {# three #} c\n")
c("raw", "{% raw %}{{ not }} {% this %}{% endraw %}\n{%- raw -%} {{ x }} {%- endraw %}!")
c("carriage returns", "a\r\n{% if true %}\r\nb\r\n{% endif %}\rc{{ 'x\r\ny' }}\r\n")
c("tabs before blocks", "\t{% if true %}\n\tx\n\t{% endif %}\ty\n")

# loops, names
c("loop variables", "{% for m in messages %}{{ loop.index }}{{ loop.index0 }}{{ loop.revindex }}{{ loop.revindex0 }}{{ loop.first }}{{ loop.last }}{{ loop.length }}{{ loop.previtem.role if loop.previtem is defined }}{{ loop.nextitem.role if not loop.last }};{% endfor %}", TURNS)
c("loop controls", "{% for i in range(10) %}{% if i == 2 %}{% continue %}{% endif %}{% if i > 4 %}{% break %}{% endif %}{{ i }}{% else %}none{% endfor %}{% for i in [] %}x{% else %}empty{% endfor %}")
c("loop filter and unpacking", "{% for k, v in {'a': 1, 'b': 2}.items() if v > 1 %}{{ k }}={{ v }}{% endfor %}{% for a, b in [(1, 2), [3, 4]] %}{{ a + b }} {% endfor %}")
c("loop cycle and changed", "{% for m in messages %}{{ loop.cycle('x', 'y') }}{{ loop.changed(m.role == 'user') }}{% endfor %}", TURNS)
c("recursive loop", "{% for n in tree recursive %}{{ n.v }}{% if n.c %}({{ loop(n.c) }}){% endif %}{{ loop.depth }}{% endfor %}", tree=[{"v": "a", "c": [{"v": "b"}, {"v": "c", "c": [{"v": "d"}]}]}, {"v": "e"}])
c("scope of set", "{% set x = 1 %}{% for i in [1, 2] %}{% set x = x + i %}{{ x }}{% endfor %}{{ x }}{% if true %}{% set x = 9 %}{% endif %}{{ x }}")
c("namespace", "{% set ns = namespace(n=0, seen=[], last=none) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% set ns.seen = ns.seen + [m.role] %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{{ ns.n }} {{ ns.seen }} {{ ns.last }} {{ ns.missing is defined }}", TURNS)
c("namespace of a dict", "{% set ns = namespace({'a': 1}) %}{{ ns.a }}{% set ns.a = 'x' %}{{ ns.a }}")
c("set blocks and filters", "{% set x %}\n  a {{ 1 }}\n{% endset %}[{{ x }}]{% set y | upper %}abc{% endset %}{{ y }}{% filter replace('a', 'b') %}banana{% endfilter %}")
c("with", "{% with a = 1, b = a %}{{ a }}{% endwith %}{{ a is defined }}{% with %}{% set q = 1 %}{{ q }}{% endwith %}{{ q is defined }}")
c("several targets", "{% set a, b = 1, 'x' %}{{ a }}{{ b }}{% set (c, d) = (3, 4) %}{{ c + d }}")
c("macros", "{% macro row(name, value='-', *, sep=': ') %}{{ name }}{{ sep }}{{ value }}{% endmacro %}{{ row('a') }};{{ row('b', 2) }};{{ row(value=3, name='c') }}".replace(", *, sep=': '", ", sep=': '"))
c("macro and caller", "{% macro box(t) %}<{{ t }}>{{ caller() }}</{{ t }}>{% endmacro %}{% call box('p') %}in {{ messages[0].role }}{% endcall %}")
c("macro recursion", "{% macro walk(s, d=0) %}{{ '  ' * d }}{{ s.type if s.type is string else s.type | join('|') }}\n{% for k, v in (s.properties or {}).items() %}{{ '  ' * (d + 1) }}{{ k }}:\n{{ walk(v, d + 2) }}{% endfor %}{% endmacro %}{{ walk(tools[0].function.parameters) }}", tools=[WEATHER])
c("macro does not see the loop", "{% macro m() %}{{ x is defined }}{{ messages | length }}{% endmacro %}{% for x in [1] %}{{ m() }}{% endfor %}")
c("generation marks", "{% for m in messages %}{%- if m.role == 'assistant' %}{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}\n{% else %}{{ m.content }}\n{%- endif %}{% endfor %}{%- generation -%}  x  {%- endgeneration -%}  y", TURNS)

# access
c("attributes and items", "{{ messages[0].role }}{{ messages[0]['content'] }}{{ messages[-1]['role'] }}{{ messages[0].missing }}{{ messages[0]['missing'] }}{{ messages[9] }}{{ messages[0].get('name', 'anon') }}{{ messages[0].get('name') }}", TURNS)
c("keys named like methods", "{% for k, v in tools[0].function.parameters.properties.items() %}{{ k }} {% endfor %}{{ {'items': 1, 'get': 2, 'keys': 3}.items() | list }}{{ {'get': 2}.get('get') }}{{ tools[0].function.parameters.properties['items'].type }}", tools=[WEATHER])
c("slices", "{{ messages[1:] | length }}{{ messages[:-1] | length }}{{ messages[::-1][0].role }}{{ messages[1:3][0].role }}{{ 'héllo'[1:3] }}{{ 'héllo'[::-1] }}{{ 'abc'[-2:] }}{{ [1,2,3,4,5][::2] }}{{ 'abc'[1] }}{{ (1, 2, 3)[1:] }}", TURNS)
c("undefined attribute of undefined", "{{ nothing.more }}")
c("adding to undefined", "{{ 'a' + nothing }}")
c("adding none", "{{ 'a' + none }}")
c("undefined in places", "{{ nothing is defined }}{{ nothing is none }}{{ nothing == none }}{{ 'a' in nothing }}{% for x in nothing %}x{% endfor %}{{ nothing | length }}{{ nothing | default('d') }}{{ '' | default('e', true) }}{{ none | default('f') }}{{ nothing or 'g' }}{{ not nothing }}")
c("attribute of none", "{{ none.x is defined }}{{ (none.x.y is defined) if false else 'no' }}")
c("calling what is no function", "{{ nothing() }}")

# tests and filters
c("tests", "{% for x in ['s', 1, 1.5, true, none, [1], {'a': 1}, (1,)] %}{{ x is string }} {{ x is mapping }} {{ x is sequence }} {{ x is iterable }} {{ x is number }} {{ x is integer }} {{ x is float }} {{ x is boolean }} {{ x is none }} {{ x is defined }};{% endfor %}{{ 4 is even }}{{ 4 is odd }}{{ 9 is divisibleby 3 }}{{ 1 is eq 1 }}{{ 'a' is in ['a'] }}{{ true is true }}{{ 1 is true }}{{ 'A' is upper }}{{ 1 is sameas 1 }}{{ 'abc' is not number }}")
c("filters on text", "{{ ' x ' | trim }}|{{ 'xxaxx' | trim('x') }}|{{ 'abc' | upper }}|{{ 'ABC' | lower }}|{{ 'hello wORLD' | capitalize }}|{{ \"hello wORLD it's\" | title }}|{{ 'a-b-c' | replace('-', '+') }}|{{ 'a-b-c' | replace('-', '+', 1) }}|{{ 'abc' | length }}|{{ 'abc' | first }}{{ 'abc' | last }}|{{ 'abc' | reverse }}|{{ 'abc' | list }}|{{ '%s is %d' | format('x', 3) }}|")
c("indent filter", "{{ 'a\nb\n\nc' | indent }}|{{ 'a\nb\n\nc' | indent(2, true) }}|{{ 'a\nb\n\nc' | indent(width=1, first=False, blank=True) }}|{{ 'a\nb' | indent('> ') }}")
c("filters on lists", "{{ [3, 1, 2] | sort }}{{ [3, 1, 2] | sort(reverse=true) }}{{ ['b', 'A', 'c'] | sort }}{{ ['b', 'A'] | sort(case_sensitive=true) }}{{ [1, 2, 3] | sum }}{{ [1, 2, 3] | max }}{{ [1, 2] | min }}{{ [1, 1, 2] | unique | list }}{{ [1, 2, 3] | join(', ') }}{{ [none, true, 1.0] | join('-') }}{{ [1, 2, 3] | reverse | list }}{{ [1, 2, 3, 4, 5] | batch(2) | list }}{{ [1, 2, 3, 4, 5] | slice(2) | list }}{{ range(3) | list }}{{ range(5, 1, -2) | list }}{{ [[1, 2], [3]] | sum(start=[]) }}{{ [1, 2, 3] | length }}{{ [1, 2, 3] | first }}{{ [] | first }}{{ [1, 2, 3] | last }}")
c("selectattr and map", "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}{{ messages | rejectattr('role', 'eq', 'system') | map(attribute='content') | join('|') }}{{ messages | map('length') | list }}{{ messages | selectattr('name', 'defined') | list }}{{ messages | selectattr('content') | list | length }}{{ ['a', 'b'] | map('upper') | join }}{{ [1, 2, 3, 4] | select('odd') | list }}{{ [1, 2] | reject('gt', 1) | list }}{{ messages | map(attribute='name', default='?') | join(',') }}{{ messages | groupby('role') | map(attribute=0) | list }}", TURNS)
c("filters on dicts", "{% for k, v in tools[0].function | items %}{{ k }},{% endfor %}{% for k, v in {'b': 1, 'a': 2} | dictsort %}{{ k }}{{ v }}{% endfor %}{{ {'b': 1, 'a': 2} | dictsort(by='value', reverse=true) }}{{ {'a': 1} | list }}{{ {'a': 1} | length }}{{ {'a': 1}.keys() | list }}{{ {'a': 1}.values() | list }}{{ {'b': 1, 'a': 2} | first }}{{ {'b': 1, 'a': 2}.keys() | sort }}", tools=[WEATHER])
c("numbers from text", "{{ '42' | int }}{{ 'x' | int }}{{ 'x' | int(7) }}{{ '3.5' | float }}{{ 3.7 | int }}{{ 2.567 | round(1) }}{{ 2.5 | round }}{{ -3 | abs }}{{ 3.2 | round(0, 'ceil') }}{{ '1' | int + 1 }}{{ '0x1f' | int(base=16) }}")
c("escape and safe", "{{ '<a href=\"x\">&' | e }}{{ '<b>' | safe }}{{ '<i>' }}{{ \"it's\" | escape }}")
c("string methods", "{{ ' x '.strip() }}|{{ 'xxaxx'.strip('x') }}|{{ '\n\nab'.lstrip('\n') }}|{{ 'ab\n'.rstrip('\n') }}|{{ 'a,b,,c'.split(',') }}|{{ ' a  b '.split() }}|{{ 'a,b,c'.split(',', 1) }}|{{ 'a,b,c'.rsplit(',', 1) }}|{{ 'a</think>b</think>c'.split('</think>')[-1] }}|{{ 'a\nb\r\nc'.splitlines() }}|{{ 'abc'.startswith('ab') }}|{{ 'abc'.endswith(('x', 'c')) }}|{{ 'abc'.replace('b', '') }}|{{ 'aaa'.replace('a', 'b', 2) }}|{{ 'ab'.upper() }}|{{ 'aB cD'.title() }}|{{ 'aB'.capitalize() }}|{{ 'abcabc'.find('c') }}|{{ 'abc'.find('x') }}|{{ 'abca'.count('a') }}|{{ ', '.join(['a', 'b']) }}|{{ '12'.isdigit() }}|{{ 'a1'.isalnum() }}|{{ ' '.isspace() }}|{{ 'a-b-c'.partition('-') }}|{{ 'a-b-c'.rpartition('-') }}|{{ 'abc'.removeprefix('a').removesuffix('c') }}|{{ '{} {x} {0!r}'.format(1, x='y') if false else '{} {}'.format(1, 'a') }}|{{ '7'.zfill(3) }}|{{ '-7'.zfill(4) }}|{{ 'a'.ljust(3) }}|{{ 'a'.rjust(3, '.') }}|{{ 'abcd'.center(7, '*') }}|{{ 'abc'.center(6, '*') }}|{{ 'aB'.swapcase() }}|{{ 'Straße'.upper() }}|{{ 'ß'.capitalize() }}|{{ 'ΑΣ'.lower() }}")
c("string methods with places", "{{ 'abcabc'.find('c', 3) }}|{{ 'abcabc'.rfind('c', 0, 4) }}|{{ 'abcabc'.count('a', 1) }}|{{ 'abcabc'.startswith('c', 2) }}|{{ 'abc'.index('b') }}|{{ 'héhé'.find('é', -2) }}|{{ 'a b c'.split(maxsplit=1) }}|{{ 'a\n'.splitlines(keepends=True) }}|{{ 'abc'.startswith('b', 1, 2) }}|{{ 'Ab'.islower() }}{{ 'AB'.isupper() }}{{ '1'.isupper() }}")
c("splitting on nothing", "{{ 'abc'.split('') }}")
c("python whitespace", "[{{ '\u00a0\u2003\x1c x \x85'.strip() }}][{{ '\u200b x' | trim }}][{{ 'a\x1fb\u3000c'.split() }}]")
c("list and dict methods", "{{ [1, 2, 1].count(1) }}{{ ['a', 'b'].index('b') }}{{ {'a': 1}.get('a') }}{{ {'a': 1}.get('b', 2) }}{{ {'a': 1}.copy() }}{{ [1].copy() }}")
c("a list may not be changed", "{% set x = [] %}{{ x.append(1) }}")
c("a dict may not be changed", "{{ messages[0].update({'a': 1}) }}")
c("underscore names", "{{ ''.__class__ }}")
c("in operator on keys", "{{ 'content' in messages[0] }}{{ 'tool_calls' in messages[0] }}{{ messages[0].tool_calls is defined }}{{ messages[0]['tool_calls'] is not none }}")
c("tools and documents without any", "{{ tools is defined }}{{ tools is none }}{{ documents is defined }}{{ documents is none }}{{ not tools }}")
c("special tokens", "{{ bos_token }}{{ eos_token }}{{ pad_token }}[{{ unk_token }}]{{ unk_token is defined }}")
c("variables win over special tokens", "{{ bos_token }}", bos_token="<B>")
c("null keys are left out", "{{ messages[1] | tojson }}{{ messages[1].content is defined }}", TOOL_TURNS)
c("reasoning has two names", "{% for m in messages %}{{ m.reasoning_content }}/{{ m.thinking }};{% endfor %}", [{"role": "assistant", "content": "a", "reasoning": "r"}, {"role": "assistant", "content": "b", "thinking": "t"}, {"role": "assistant", "content": "c", "reasoning_content": "q"}, {"role": "user", "content": "d"}])

# functions
c("strftime", "{{ strftime_now('%d %b %Y') }}|{{ strftime_now('%Y-%m-%d %H:%M:%S') }}|{{ strftime_now('%A, %B %-d, %Y %I:%M %p %j %a %y %e %U %W %w %u %% %F %T %D %C %h') }}|{{ strftime_now('%c %x %X') }}|{{ strftime_now('no date') }}|{{ strftime_now('%Z%z') }}|")
c("raise", "{{ raise_exception('only \"user\" and ünicode!') }}")
c("raise in a macro", "{% macro check(m) %}{% if m.role == 'user' %}{{ raise_exception('bad role: ' ~ m.role) }}{% endif %}{% endmacro %}{% for m in messages %}{{ check(m) }}{% endfor %}")
c("raise is lazy", "{{ 'ok' if messages else raise_exception('no') }}")
c("dict function", "{{ dict(a=1, b='x') }}{{ dict({'q': 1}, r=2) }}")
c("range and lipsum", "{{ range(3) | list }}{{ range(1, 4) | sum }}{{ 2 in range(5) }}{{ range(0) | length }}")

# families
LLAMA31 = """{{- bos_token }}
{%- if custom_tools is defined %}
    {%- set tools = custom_tools %}
{%- endif %}
{%- if not tools_in_user_message is defined %}
    {%- set tools_in_user_message = true %}
{%- endif %}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}

{#- The first message may be the system's. #}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}

{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if builtin_tools is defined or tools is not none %}
    {{- "Environment: ipython\\n" }}
{%- endif %}
{%- if builtin_tools is defined %}
    {{- "Tools: " + builtin_tools | reject('equalto', 'code_interpreter') | join(", ") + "\\n\\n"}}
{%- endif %}
{{- "Cutting Knowledge Date: December 2023\\n" }}
{{- "Today Date: " + date_string + "\\n\\n" }}
{%- if tools is not none and not tools_in_user_message %}
    {{- "You have access to the following functions.\\n\\n" }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message }}
{{- "<|eot_id|>" }}

{%- if tools_in_user_message and not tools is none %}
    {%- if messages | length != 0 %}
        {%- set first_user_message = messages[0]['content']|trim %}
        {%- set messages = messages[1:] %}
    {%- else %}
        {{- raise_exception("Cannot put tools in the first user message when there's no first user message!") }}
{%- endif %}
    {{- '<|start_header_id|>user<|end_header_id|>\\n\\n' -}}
    {{- "Given the following functions, answer with a call.\\n\\n" }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
    {{- first_user_message + "<|eot_id|>"}}
{%- endif %}

{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {%- if builtin_tools is defined and tool_call.name in builtin_tools %}
            {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
            {{- "<|python_tag|>" + tool_call.name + ".call(" }}
            {%- for arg_name, arg_val in tool_call.arguments | items %}
                {{- arg_name + '="' + arg_val + '"' }}
                {%- if not loop.last %}
                    {{- ", " }}
                {%- endif %}
                {%- endfor %}
            {{- ")" }}
        {%- else  %}
            {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
            {{- '{"name": "' + tool_call.name + '", ' }}
            {{- '"parameters": ' }}
            {{- tool_call.arguments | tojson }}
            {{- "}" }}
        {%- endif %}
        {%- if builtin_tools is defined %}
            {{- "<|eom_id|>" }}
        {%- else %}
            {{- "<|eot_id|>" }}
        {%- endif %}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
f("llama 3.1", LLAMA31, TURNS)
f("llama 3.1 with tools", LLAMA31, TOOL_TURNS, tools=[WEATHER, EMPTY])
f("llama 3.1 with tools for the system", LLAMA31, [S] + TOOL_TURNS, tools=[WEATHER], tools_in_user_message=False, date_string="1 Jan 2025")
f("llama 3.1 with builtin tools", LLAMA31, [U, {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "search", "arguments": {"query": "ö", "n": "2"}}}]}], builtin_tools=["search", "code_interpreter"], gen=False)
f("llama 3.1 with two calls", LLAMA31, [U, {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "a", "arguments": {}}}, {"function": {"name": "b", "arguments": {}}}]}])
f("llama 3.1 unicode", LLAMA31, UNICODE)

QWEN3 = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "# Tools\\n\\nFunction signatures within <tools></tools> XML tags:\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools>\\n\\nFor each call: {\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}<|im_end|>\\n" }}
{%- else %}
    {%- if messages[0].role == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- else %}
            {%- if '</think>' in content %}
                {%- set reasoning_content = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
                {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
            {%- endif %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index %}
            {%- if loop.last or (not loop.last and reasoning_content) %}
                {{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
            {%- else %}
                {{- '<|im_start|>' + message.role + '\\n' + content }}
            {%- endif %}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {%- if message.tool_calls %}
            {%- for tool_call in message.tool_calls %}
                {%- if (loop.first and content) or (not loop.first) %}
                    {{- '\\n' }}
                {%- endif %}
                {%- if tool_call.function %}
                    {%- set tool_call = tool_call.function %}
                {%- endif %}
                {{- '<tool_call>\\n{"name": "' }}
                {{- tool_call.name }}
                {{- '", "arguments": ' }}
                {%- if tool_call.arguments is string %}
                    {{- tool_call.arguments }}
                {%- else %}
                    {{- tool_call.arguments | tojson }}
                {%- endif %}
                {{- '}\\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' }}
        {{- content }}
        {{- '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""
f("qwen3", QWEN3, TURNS)
f("qwen3 thinking", QWEN3, THINK)
f("qwen3 not thinking", QWEN3, THINK[:3], enable_thinking=False)
f("qwen3 with tools", QWEN3, [S] + TOOL_TURNS, tools=[WEATHER, EMPTY])
f("qwen3 calls after the last question", QWEN3, TOOL_TURNS[:3], tools=[WEATHER])

QWEN35 = """{%- set image_count = namespace(value=0) %}
{%- macro render_content(content, do_vision_count, is_system_content=false) %}
    {%- if content is string %}
        {{- content }}
    {%- elif content is iterable and content is not mapping %}
        {%- for item in content %}
            {%- if 'image' in item or 'image_url' in item or item.type == 'image' %}
                {%- if is_system_content %}
                    {{- raise_exception('System message cannot contain images.') }}
                {%- endif %}
                {%- if do_vision_count %}
                    {%- set image_count.value = image_count.value + 1 %}
                {%- endif %}
                {%- if add_vision_id %}
                    {{- 'Picture ' ~ image_count.value ~ ': ' }}
                {%- endif %}
                {{- '<|vision_start|><|image_pad|><|vision_end|>' }}
            {%- elif 'text' in item %}
                {{- item.text }}
            {%- else %}
                {{- raise_exception('Unexpected item type in content.') }}
            {%- endif %}
        {%- endfor %}
    {%- elif content is none or content is undefined %}
        {{- '' }}
    {%- else %}
        {{- raise_exception('Unexpected content type.') }}
    {%- endif %}
{%- endmacro %}
{%- if not messages %}
    {{- raise_exception('No messages provided.') }}
{%- endif %}
{%- if tools and tools is iterable and tools is not mapping %}
    {{- '<|im_start|>system\\n' }}
    {{- "# Tools\\n\\nYou have access to the following functions:\\n\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools>" }}
    {%- if messages[0].role == 'system' %}
        {%- set content = render_content(messages[0].content, false, true)|trim %}
        {%- if content %}
            {{- '\\n\\n' + content }}
        {%- endif %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- else %}
    {%- if messages[0].role == 'system' %}
        {%- set content = render_content(messages[0].content, false, true)|trim %}
        {{- '<|im_start|>system\\n' + content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" %}
        {%- set content = render_content(message.content, false)|trim %}
        {%- if not(content.startswith('<tool_response>') and content.endswith('</tool_response>')) %}
            {%- set ns.multi_step_tool = false %}
            {%- set ns.last_query_index = index %}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if ns.multi_step_tool %}
    {{- raise_exception('No user query found in messages.') }}
{%- endif %}
{%- for message in messages %}
    {%- set content = render_content(message.content, true)|trim %}
    {%- if message.role == "system" %}
        {%- if not loop.first %}
            {{- raise_exception('System message must be at the beginning.') }}
        {%- endif %}
    {%- elif message.role == "user" %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- else %}
            {%- if '</think>' in content %}
                {%- set reasoning_content = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
                {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
            {%- endif %}
        {%- endif %}
        {%- set reasoning_content = reasoning_content|trim %}
        {%- if loop.index0 > ns.last_query_index %}
            {{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning_content + '\\n</think>\\n\\n' + content }}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {%- if message.tool_calls and message.tool_calls is iterable and message.tool_calls is not mapping %}
            {%- for tool_call in message.tool_calls %}
                {%- if tool_call.function is defined %}
                    {%- set tool_call = tool_call.function %}
                {%- endif %}
                {%- if loop.first %}
                    {%- if content|trim %}
                        {{- '\\n\\n<tool_call>\\n<function=' + tool_call.name + '>\\n' }}
                    {%- else %}
                        {{- '<tool_call>\\n<function=' + tool_call.name + '>\\n' }}
                    {%- endif %}
                {%- else %}
                    {{- '\\n<tool_call>\\n<function=' + tool_call.name + '>\\n' }}
                {%- endif %}
                {%- if tool_call.arguments is defined %}
                    {%- for args_name, args_value in tool_call.arguments|items %}
                        {{- '<parameter=' + args_name + '>\\n' }}
                        {%- set args_value = args_value | tojson | safe if args_value is mapping or (args_value is sequence and args_value is not string) else args_value | string %}
                        {{- args_value }}
                        {{- '\\n</parameter>\\n' }}
                    {%- endfor %}
                {%- endif %}
                {{- '</function>\\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.previtem and loop.previtem.role != "tool" %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' }}
        {{- content }}
        {{- '\\n</tool_response>' }}
        {%- if not loop.last and loop.nextitem.role != "tool" %}
            {{- '<|im_end|>\\n' }}
        {%- elif loop.last %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- else %}
        {{- raise_exception('Unexpected message role.') }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- else %}
        {{- '<think>\\n' }}
    {%- endif %}
{%- endif %}"""
f("qwen3.5", QWEN35, TURNS)
f("qwen3.5 parts", QWEN35, PARTS)
f("qwen3.5 image", QWEN35, [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]}], add_vision_id=True)
f("qwen3.5 thinking", QWEN35, THINK, enable_thinking=False)
f("qwen3.5 with tools", QWEN35, [S] + TOOL_TURNS, tools=[WEATHER])
f("qwen3.5 calls", QWEN35, TOOL_TURNS[:3], tools=[WEATHER, EMPTY])
f("qwen3.5 without a user", QWEN35, [A])
f("qwen3.5 late system message", QWEN35, [U, S])
f("qwen3.5 image for the system", QWEN35, [{"role": "system", "content": [{"type": "image"}]}, U])

MISTRAL = """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}

{#- Alternation, tool messages aside. #}
{%- set ns = namespace() %}
{%- set ns.index = 0 %}
{%- for message in loop_messages %}
    {%- if not (message.role == "tool" or message.role == "tool_results" or (message.tool_calls is defined and message.tool_calls is not none)) %}
        {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
            {{- raise_exception("After the optional system message, conversation roles must alternate user/assistant/user/assistant/...") }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}

{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == user_messages[-1]) %}
            {{- "[AVAILABLE_TOOLS] [" }}
            {%- for tool in tools %}
                {%- set tool = tool.function %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, val in tool.items() if key != "return" %}
                    {%- if val is string %}
                        {{- '"' + key + '": "' + val + '"' }}
                    {%- else %}
                        {{- '"' + key + '": ' + val|tojson }}
                    {%- endif %}
                    {%- if not loop.last %}
                        {{- ", " }}
                    {%- endif %}
                {%- endfor %}
                {{- "}}" }}
                {%- if not loop.last %}
                    {{- ", " }}
                {%- else %}
                    {{- "]" }}
                {%- endif %}
            {%- endfor %}
            {{- "[/AVAILABLE_TOOLS]" }}
            {%- endif %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS] [" }}
        {%- for tool_call in message.tool_calls %}
            {%- set out = tool_call.function|tojson %}
            {{- out[:-1] }}
            {%- if not tool_call.id is defined or tool_call.id|length != 9 %}
                {{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}
            {%- endif %}
            {{- ', "id": "' + tool_call.id + '"}' }}
            {%- if not loop.last %}
                {{- ", " }}
            {%- else %}
                {{- "]" + eos_token }}
            {%- endif %}
        {%- endfor %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"]|trim + eos_token}}
    {%- elif message["role"] == "tool_results" or message["role"] == "tool" %}
        {%- if message.content is defined and message.content.content is defined %}
            {%- set content = message.content.content %}
        {%- else %}
            {%- set content = message.content %}
        {%- endif %}
        {{- '[TOOL_RESULTS] {"content": ' + content|string + ", " }}
        {{- '"call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- else %}
        {{- raise_exception("Only user and assistant roles are supported, with the exception of an initial optional system message!") }}
    {%- endif %}
{%- endfor %}
"""
f("mistral v3", MISTRAL, TURNS)
f("mistral v3 with tools", MISTRAL, TOOL_TURNS, tools=[WEATHER, EMPTY])
f("mistral v3 out of turn", MISTRAL, [U, U])
f("mistral v3 unknown role", MISTRAL, [U, {"role": "critic", "content": "x"}])

GEMMA = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}
        {%- set first_user_prefix = messages[0]['content'] + '\n\n' -%}
    {%- else -%}
        {%- set first_user_prefix = messages[0]['content'][0]['text'] + '\n\n' -%}
    {%- endif -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set first_user_prefix = "" -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif -%}
    {%- if (message['role'] == 'assistant') -%}
        {%- set role = "model" -%}
    {%- else -%}
        {%- set role = message['role'] -%}
    {%- endif -%}
    {{ '<start_of_turn>' + role + '\n' + (first_user_prefix if loop.first else "") }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'image' -%}
                {{ '<start_of_image>' }}
            {%- elif item['type'] == 'text' -%}
                {{ item['text'] | trim }}
            {%- endif -%}
        {%- endfor -%}
    {%- else -%}
        {{ raise_exception("Invalid content type") }}
    {%- endif -%}
    {{ '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{'<start_of_turn>model\n'}}
{%- endif -%}
"""
f("gemma 3", GEMMA, TURNS)
f("gemma 3 parts", GEMMA, PARTS)
f("gemma 3 content of no type", GEMMA, [{"role": "user", "content": 7}])

f("chatml", "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou are a helper.<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}", TURNS[1:])
f("llama 2", "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}{% set system_message = false %}{% endif %}{% for message in loop_messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Conversation roles must alternate') }}{% endif %}{% if loop.index0 == 0 and system_message != false %}{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}{% else %}{% set content = message['content'] %}{% endif %}{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}{% elif message['role'] == 'assistant' %}{{ ' '  + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}", TURNS, gen=False)

# Recursive macros over a JSON schema, in the manner of gpt-oss.
SCHEMA = """{%- macro kind(spec, required, level=0) -%}
    {%- if spec.type == "array" -%}
        {%- if spec['items'] -%}
            {{- kind(spec['items'], required, level + 1) + "[]" }}
        {%- else -%}
            {{- "any[]" }}
        {%- endif %}
        {%- if spec.nullable %}{{- " | null" }}{% endif -%}
    {%- elif spec.type is defined and spec.type is iterable and spec.type is not string and spec.type is not mapping and spec.type[0] is defined -%}
        {%- if spec.type | length > 1 -%}
            {{- spec.type | join(" | ") }}
        {%- else -%}
            {{- spec.type[0] }}
        {%- endif -%}
    {%- elif spec.type == "string" -%}
        {%- if spec.enum -%}
            {{- '"' + spec.enum|join('" | "') + '"' -}}
        {%- else -%}
            {{- "string" }}
        {%- endif %}
    {%- elif spec.type == "object" and spec.properties -%}
        {{- "{\\n" }}
        {%- for name, prop in spec.properties.items() -%}
            {{- "  " * (level + 1) + name }}
            {%- if name not in (spec.required or []) -%}{{- "?" }}{%- endif -%}
            {{- ": " }}{{ kind(prop, spec.required or [], level + 1) }}
            {%- if prop.default is defined %} // default: {{ prop.default | tojson if prop.default is string else prop.default }}{% endif -%}
            {%- if not loop.last %}{{ ",\\n" }}{% else %}{{ "\\n" }}{% endif -%}
        {%- endfor -%}
        {{- "  " * level + "}" }}
    {%- else -%}
        {{- spec.type or "any" }}
    {%- endif -%}
{%- endmacro -%}
{%- for tool in tools %}
type {{ tool.function.name }} = (_: {{ kind(tool.function.parameters, []) }}) => any;
{% endfor -%}
<|start|>{{ messages[-1].role }}<|message|>{{ messages[-1].content }}<|end|>"""
f("recursive schema", SCHEMA, TURNS, tools=[WEATHER, EMPTY])

# A system prompt, a list of documents and break, in the manner of Command R and Hermes.
f("breaks and joins", """{%- set found = namespace(system=none) -%}
{%- for message in messages -%}
    {%- if message.role == 'system' -%}
        {%- set found.system = message.content -%}
        {%- break -%}
    {%- endif -%}
{%- endfor -%}
{%- if found.system is none -%}
    {%- set found.system = 'none' -%}
{%- endif -%}
System: {{ found.system }}
{% for message in messages %}
    {% if message.role == 'system' %}
        {% continue %}
    {% endif %}
    {{ loop.index }}. {{ message.role | upper }}: {{ message.content | trim }}
{% endfor %}
Roles: {{ messages | map(attribute='role') | unique | sort | join(', ') }}
""", TURNS)


def render(case):
    variables = {**case["special"], **case["variables"]}
    try:
        messages = _normalize_chat_messages(case["messages"])
        text, _ = render_jinja_template(
            conversations=[messages],
            tools=case["tools"] or None,
            chat_template=case["template"],
            add_generation_prompt=case["add_generation_prompt"],
            **variables,
        )
        return {"expected": text[0]}
    except jinja2.exceptions.TemplateError as error:
        if type(error) is jinja2.exceptions.TemplateError:
            return {"raises": str(error)}
        return {"fails": f"{type(error).__name__}: {error}"}
    except (TypeError, ValueError) as error:
        return {"fails": f"{type(error).__name__}: {error}"}


here = pathlib.Path(__file__).parent
for name, cases in [("constructs", constructs), ("families", families)]:
    rows = [{**case, **render(case)} for case in cases]
    assert len({row["name"] for row in rows}) == len(rows)
    # A template that several cases use is written once.
    names = {}
    for row in rows:
        row["template"] = names.setdefault(row["template"], row["name"])
    file = {"templates": {name: template for template, name in names.items()}, "cases": rows}
    (here / f"{name}.json").write_text(json.dumps(file, indent=1) + "\n")
    print(name, len(rows), sum("expected" in row for row in rows))
    for row in rows:
        if "fails" in row:
            print("  fails:", row["name"], "|", row["fails"])
