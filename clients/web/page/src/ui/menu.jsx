/** A button that opens a menu; arrows walk it, Escape closes it. */

import { useEffect, useRef, useState } from "preact/hooks";
import { Icon } from "./icons.jsx";

/** @param {{label: string, icon?: string, items: ([string, () => void, string?] | null)[], class?: string, children?: any}} props */
export function Menu({ label, icon = "more", items, class: more = "", children }) {
  const [open, setOpen] = useState(false);
  const list = useRef(null);
  const button = useRef(null);
  useEffect(() => {
    if (!open) return undefined;
    const edge = list.current.closest(".log")?.getBoundingClientRect();
    const { bottom, height } = list.current.getBoundingClientRect();
    list.current.classList.toggle("up", Boolean(edge) && bottom > edge.bottom && button.current.getBoundingClientRect().top - height > edge.top);
    list.current.querySelector("button").focus();
    const outside = (event) => { if (!list.current?.contains(event.target) && !button.current.contains(event.target)) setOpen(false); };
    document.addEventListener("pointerdown", outside);
    return () => document.removeEventListener("pointerdown", outside);
  }, [open]);
  const close = () => { setOpen(false); button.current?.focus(); };
  const walk = (event) => {
    const all = [...list.current.querySelectorAll("button")];
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (event.key === "Escape" || event.key === "Tab") { event.stopPropagation(); event.preventDefault(); close(); }
    if (!step) return;
    event.preventDefault();
    all.at((all.indexOf(document.activeElement) + step) % all.length).focus();
  };
  return (
    <div class="menu">
      <button type="button" ref={button} class={`quiet ${more}`} aria-label={label} title={label} aria-haspopup="menu" aria-expanded={open}
        onClick={(event) => { event.stopPropagation(); setOpen(!open); }}>
        {children ?? <Icon name={icon} />}
      </button>
      {open && (
        <div role="menu" ref={list} aria-label={label} onKeyDown={walk}>
          {items.filter(Boolean).map(([text, action, kind]) => (
            <button type="button" role="menuitem" key={text} class={kind ?? ""} onClick={(event) => { event.stopPropagation(); close(); action(); }}>{text}</button>
          ))}
        </div>
      )}
    </div>
  );
}
