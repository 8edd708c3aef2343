/** Line icons, drawn on a grid of 24. */

const PATHS = {
  menu: "M4 6h16M4 12h16M4 18h16",
  sidebar: "M4 5h16v14H4zM9.500 5v14",
  plus: "M12 5v14M5 12h14",
  search: "M11 4a7 7 0 1 0 0 14 7 7 0 0 0 0-14M16.2 16.2 20 20",
  settings: "M4 7h9M19 7h1M4 17h1M11 17h9M16 4.5a2.5 2.5 0 1 0 0 5 2.5 2.5 0 0 0 0-5M8 14.5a2.5 2.5 0 1 0 0 5 2.5 2.5 0 0 0 0-5",
  tree: "M6 4v9a4 4 0 0 0 4 4h4M6 8h8M16 6h4v4h-4zM16 15h4v4h-4z",
  send: "M12 19V5M6 11l6-6 6 6",
  stop: "M7.5 7.5h9v9h-9z",
  left: "M14.5 6 8.5 12l6 6",
  right: "M9.5 6l6 6-6 6",
  edit: "M4 20h4L19 9l-4-4L4 16zM13 7l4 4",
  trash: "M5 7h14M10 7V4h4v3M7 7l1 13h8l1-13",
  copy: "M9 9h11v11H9zM5 15H4V4h11v1",
  check: "M5 12.5 10 17.5 19 7",
  retry: "M5 12a7 7 0 1 0 2.2-5.1M5 4v4h4",
  more: "M6 12h.01M12 12h.01M18 12h.01",
  close: "M6 6l12 12M18 6 6 18",
  attach: "M19 11.5 12 18.5a4.5 4.5 0 0 1-6.4-6.4l7.5-7.5a3 3 0 0 1 4.3 4.3l-7.4 7.3a1.5 1.5 0 0 1-2.1-2.1l6.5-6.5",
  camera: "M4 8h3.500L9 5.500h6L16.500 8H20v11H4zM12 10a3.500 3.500 0 1 0 0 7 3.500 3.500 0 0 0 0-7",
  go: "M6 5l8 7-8 7M17 5v14",
  columns: "M4 5h16v14H4zM9.3 5v14M14.7 5v14",
  thought: "M9.500 17.500h5M10 20.500h4M12 3.500a6 6 0 0 0-3.500 10.900c.6.5 1 1.200 1 2h5c0-.8.4-1.500 1-2A6 6 0 0 0 12 3.500",
  braces: "M9 4c-2.500 0-2.500 2-2.500 4s0 4-2.500 4c2.500 0 2.500 2 2.500 4s0 4 2.500 4M15 4c2.500 0 2.500 2 2.500 4s0 4 2.500 4c-2.500 0-2.500 2-2.500 4s0 4-2.500 4",
  tool: "M14.500 6.500a4 4 0 0 1 5.200-3.200L17 6l1 1 2.700-2.700A4 4 0 0 1 16 9.500L8.500 17.500a2 2 0 0 1-2.800 0l0 0a2 2 0 0 1 0-2.800L13.500 7.800a4 4 0 0 1 1-1.300z",
  share: "M12 15V4M8 8l4-4 4 4M5 13v6h14v-6",
  file: "M6 3h8l4 4v14H6zM14 3v4h4",
  down: "M6 9.500l6 6 6-6",
  eye: "M2.500 12S6 5.500 12 5.500 21.500 12 21.500 12 18 18.500 12 18.500 2.500 12 2.500 12M12 9.500a2.500 2.500 0 1 0 0 5 2.500 2.500 0 0 0 0-5",
};

/** @param {{name: keyof typeof PATHS}} props */
export function Icon({ name }) {
  return <svg class="icon" viewBox="0 0 24 24" aria-hidden="true"><path d={PATHS[name]} /></svg>;
}

/** A button that shows only an icon; `label` is what it is called. */
export function IconButton({ name, label, class: more = "", ...rest }) {
  return <button type="button" class={`quiet ${more}`} aria-label={label} title={label} {...rest}><Icon name={name} /></button>;
}
