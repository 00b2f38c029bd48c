//! A line chart as SVG: panels, one below the other, over the same steps.
//!
//! The chart brings its own ground, so that it is readable on light pages and on dark ones.

use std::fmt::{self, Write};
use std::ops::RangeInclusive;

/// One coordinate system.
pub(super) struct Panel {
    pub(super) title: &'static str,
    /// What is on the vertical axis, with its unit.
    pub(super) unit: &'static str,
    /// Of the vertical axis, in pixels.
    pub(super) height: f64,
    pub(super) lines: Vec<Line>,
}

/// One line of a panel.
pub(super) struct Line {
    pub(super) style: Style,
    pub(super) weight: Weight,
    pub(super) points: Vec<(f64, f64)>,
}

/// Colour and dashes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Style {
    Solid,
    Dashed,
    Dotted,
}

/// How strongly a line is drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Weight {
    /// What the eye is to follow.
    Strong,
    /// What it may look at too.
    Faint,
}

const WIDTH: f64 = 760.0;
/// From the chart's edges to the axes.
const LEFT: f64 = 78.0;
const RIGHT: f64 = 24.0;
/// Above a panel's axes, for its title, and below them, for the numbers of the steps.
const ABOVE: f64 = 40.0;
const BELOW: f64 = 34.0;
/// The legend's height.
const LEGEND: f64 = 40.0;
/// For the words below the last axis.
const FOOT: f64 = 22.0;
/// About so many numbers stand beside an axis.
const TICKS: f64 = 5.0;

/// The colours tell apart for colour-blind readers too (Okabe and Ito, 2008).
const CSS: &str = "\
text { font: 13px system-ui, sans-serif; fill: #222; }
.ground { fill: #fff; }
.grid { stroke: #ddd; }
.axis { stroke: #555; }
.line { fill: none; stroke-linejoin: round; }
.strong { stroke-width: 2.2; }
.solid { stroke: #222; }
.dashed { stroke: #0072b2; stroke-dasharray: 8 3; }
.dotted { stroke: #d55e00; stroke-dasharray: 2 3; }
.faint { stroke-width: 1; stroke-dasharray: none; opacity: 0.5; }
@media (prefers-color-scheme: dark) {
text { fill: #ddd; }
.ground { fill: #16191d; }
.grid { stroke: #333a42; }
.axis { stroke: #99a; }
.solid { stroke: #ddd; }
.dashed { stroke: #56b4e9; }
.dotted { stroke: #e69f00; }
}";

/// Draws the panels. The legend names the styles; `horizontal` is what all panels share below.
///
/// # Panics
///
/// If no panel has a point.
pub(super) fn svg(panels: &[Panel], legend: &[(Style, String)], horizontal: &str) -> String {
    let height =
        LEGEND + FOOT + panels.iter().map(|panel| ABOVE + panel.height + BELOW).sum::<f64>();
    let points = || panels.iter().flat_map(|panel| &panel.lines).flat_map(|line| &line.points);
    let steps = range(points().map(|(x, _)| *x));
    let mut drawing = Drawing { text: String::new() };
    drawing.add(format_args!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" \
         width=\"{WIDTH}\" height=\"{height}\" role=\"img\">"
    ));
    drawing.add(format_args!("<style>\n{CSS}\n</style>"));
    let ground = "<rect class=\"ground\" width=\"100%\" height=\"100%\" rx=\"6\"/>";
    drawing.add(format_args!("{ground}"));
    drawing.legend(legend);
    let mut top = LEGEND;
    for panel in panels {
        let bottom = top + ABOVE + panel.height;
        let values = range(panel.lines.iter().flat_map(|line| &line.points).map(|(_, y)| *y));
        let area = Area {
            horizontal: Axis { ticks: ticks(&steps), from: LEFT, to: WIDTH - RIGHT },
            vertical: Axis { ticks: ticks(&values), from: bottom, to: top + ABOVE },
        };
        drawing.panel(panel, &area);
        top = bottom + BELOW;
    }
    let at = (LEFT + WIDTH - RIGHT) / 2.0;
    drawing.words(at, height - 12.0, "middle", horizontal);
    drawing.add(format_args!("</svg>"));
    drawing.text
}

/// The SVG, as far as it is drawn.
struct Drawing {
    text: String,
}

/// Where a panel's axes lie.
struct Area {
    horizontal: Axis,
    vertical: Axis,
}

/// An axis from its first tick to its last.
struct Axis {
    ticks: Vec<f64>,
    /// Where the first tick is, in pixels.
    from: f64,
    /// Where the last is.
    to: f64,
}

impl Axis {
    /// Where `value` is, in pixels.
    fn place(&self, value: f64) -> f64 {
        let (first, last) = (self.ticks[0], self.ticks[self.ticks.len() - 1]);
        self.from + (value - first) / (last - first) * (self.to - self.from)
    }
}

impl Drawing {
    fn add(&mut self, element: fmt::Arguments<'_>) {
        writeln!(self.text, "{element}").expect("a string takes every text");
    }

    fn words(&mut self, x: f64, y: f64, anchor: &str, words: &str) {
        let words = words.replace('&', "&amp;").replace('<', "&lt;");
        self.add(format_args!(
            "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{words}</text>"
        ));
    }

    fn stroke(&mut self, class: &str, [x1, y1, x2, y2]: [f64; 4]) {
        self.add(format_args!(
            "<line class=\"{class}\" x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\"/>"
        ));
    }

    fn legend(&mut self, entries: &[(Style, String)]) {
        let apart = (WIDTH - LEFT - RIGHT) / entries.len().max(1) as f64;
        for (index, (style, words)) in entries.iter().enumerate() {
            let (x, y) = (LEFT + apart * index as f64, 24.0);
            self.stroke(&class(*style, Weight::Strong), [x, y, x + 34.0, y]);
            self.words(x + 42.0, y + 4.0, "start", words);
        }
    }

    fn panel(&mut self, panel: &Panel, area: &Area) {
        let Area { horizontal, vertical } = area;
        let (left, right) = (horizontal.from, horizontal.to);
        let (bottom, top) = (vertical.from, vertical.to);
        self.words(left, top - 14.0, "start", panel.title);
        for (tick, label) in vertical.ticks.iter().zip(labels(&vertical.ticks)) {
            let y = vertical.place(*tick);
            self.stroke("grid", [left, y, right, y]);
            self.words(left - 8.0, y + 4.0, "end", &label);
        }
        for (tick, label) in horizontal.ticks.iter().zip(labels(&horizontal.ticks)) {
            let x = horizontal.place(*tick);
            self.stroke("axis", [x, bottom, x, bottom + 5.0]);
            self.words(x, bottom + 20.0, "middle", &label);
        }
        self.stroke("axis", [left, bottom, right, bottom]);
        self.stroke("axis", [left, bottom, left, top]);
        let (x, y) = (18.0, (top + bottom) / 2.0);
        self.add(format_args!(
            "<text x=\"{x}\" y=\"{y:.1}\" text-anchor=\"middle\" \
             transform=\"rotate(-90 {x} {y:.1})\">{}</text>",
            panel.unit
        ));
        // What is strong lies above what is faint.
        for weight in [Weight::Faint, Weight::Strong] {
            for line in panel.lines.iter().filter(|line| line.weight == weight) {
                self.line(line, area);
            }
        }
    }

    fn line(&mut self, line: &Line, area: &Area) {
        let mut points = String::new();
        for (x, y) in &line.points {
            let (x, y) = (area.horizontal.place(*x), area.vertical.place(*y));
            write!(points, "{x:.1},{y:.1} ").expect("a string takes every text");
        }
        let class = class(line.style, line.weight);
        self.add(format_args!("<polyline class=\"{class}\" points=\"{}\"/>", points.trim_end()));
    }
}

fn class(style: Style, weight: Weight) -> String {
    let style = match style {
        Style::Solid => "solid",
        Style::Dashed => "dashed",
        Style::Dotted => "dotted",
    };
    let weight = match weight {
        Weight::Strong => "strong",
        Weight::Faint => "faint",
    };
    format!("line {style} {weight}")
}

/// From the least number to the largest.
fn range(numbers: impl Iterator<Item = f64> + Clone) -> RangeInclusive<f64> {
    let least = numbers.clone().fold(f64::INFINITY, f64::min);
    let most = numbers.fold(f64::NEG_INFINITY, f64::max);
    assert!(least <= most, "a chart without points");
    least..=most
}

/// Round numbers, equally far apart, from at most the least to at least the largest of `range`.
fn ticks(range: &RangeInclusive<f64>) -> Vec<f64> {
    let span = (range.end() - range.start()).max(range.end().abs() * 1e-9).max(f64::MIN_POSITIVE);
    let power = 10_f64.powf((span / TICKS).log10().floor());
    let fits = |factor: &f64| span / (factor * power) <= TICKS;
    let apart = [1.0, 2.0, 5.0, 10.0].into_iter().find(fits).unwrap_or(10.0) * power;
    let first = (range.start() / apart).floor() as i64;
    let last = ((range.end() / apart).ceil() as i64).max(first + 1);
    (first..=last).map(|tick| tick as f64 * apart).collect()
}

/// The ticks in words, all with as many decimals as tell them apart.
fn labels(ticks: &[f64]) -> Vec<String> {
    let apart = ticks[1] - ticks[0];
    let decimals = (-apart.log10().floor()).max(0.0) as usize;
    ticks.iter().map(|tick| format!("{tick:.decimals$}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_contain_the_range() {
        assert_eq!(ticks(&(2.2..=7.7)), [2.0, 4.0, 6.0, 8.0]);
        assert_eq!(ticks(&(0.0..=400.0)), [0.0, 100.0, 200.0, 300.0, 400.0]);
        assert_eq!(labels(&ticks(&(-0.013..=-0.001))), ["-0.015", "-0.010", "-0.005", "0.000"]);
        for (least, most) in [(0.0, 0.0), (1.0, 1.0), (-3e-7, 2e-7), (5.0, 1e6)] {
            let ticks = ticks(&(least..=most));
            assert!(ticks[0] <= least && most <= ticks[ticks.len() - 1], "{ticks:?}");
            assert!((2..=8).contains(&ticks.len()), "{ticks:?}");
        }
    }

    #[test]
    fn a_chart_has_every_line_inside_its_axes() {
        let line = |style, points| Line { style, weight: Weight::Strong, points };
        let lines = vec![
            line(Style::Solid, vec![(0.0, -1.0), (10.0, 3.0)]),
            line(Style::Dotted, vec![(5.0, 1.0)]),
        ];
        let panel = Panel { title: "a < b", unit: "bits", height: 100.0, lines };
        let svg = svg(&[panel], &[(Style::Solid, "one & only".into())], "steps");
        assert_eq!(svg.matches("<polyline").count(), 2);
        assert!(svg.contains("a &lt; b") && svg.contains("one &amp; only"), "{svg}");
        let bottom = LEGEND + ABOVE + 100.0;
        let first = format!("points=\"{LEFT:.1},{bottom:.1} {:.1},", WIDTH - RIGHT);
        assert!(svg.contains(&first), "{first} {svg}");
    }
}
