/** The page's element with this id. Every id is in index.html. @param {string} id */
export const $ = (id) => document.getElementById(id);
